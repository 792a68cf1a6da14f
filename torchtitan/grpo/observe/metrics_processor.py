# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes metrics (docs/metrics.md) to console, files, TensorBoard and wandb, and serves them over HTTP."""

import itertools
import netrc
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.observe.console import Progress
from torchtitan.grpo.observe.equal_rewards import EqualRewardsWatch
from torchtitan.grpo.observe.evaluation_records import (
    evaluation_lines,
    evaluation_metrics,
    sample_records,
)
from torchtitan.grpo.observe.events import events
from torchtitan.grpo.observe.phases import Phases
from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.observe.sample_log import group_texts
from torchtitan.grpo.observe.summary import (
    RunOutcome,
    summarize,
    summarize_supervised,
    write_summary,
)
from torchtitan.grpo.observe.trackers import log_samples, open_trackers, wandb_place
from torchtitan.grpo.observe.who_waits import WhoWaits
from torchtitan.grpo.rollout.link import RolloutLink
from torchtitan.grpo.rollout.results import EvaluationResult
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.device import count_allocation_retries, take_peak_gib
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.system.monitoring.site import MonitorSite, MonitorThread

_OF_ONE_STEP = re.compile(r"(wall|wait|ranks)/.+|servers/.+_fraction")


class GRPOMetricsProcessor:
    """Writes metrics on rank 0, after :meth:`start`; other ranks write nothing."""

    steps: RunLog  # metrics.jsonl
    evaluations: RunLog  # evaluations.jsonl
    evaluated: RunLog  # evaluation_samples.jsonl

    def __init__(self, job_config: JobConfig, phases: Phases) -> None:
        _keep_wandb_offline_without_key()
        self.trackers = open_trackers(job_config)
        self._config = job_config
        self._folder = Path(job_config.job.dump_folder)
        self._progress: Progress | None = None
        self._open: list[Progress | RunLog] = []
        self._ended = threading.Event()
        if dist.get_rank() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._progress = Progress(job_config.observe.progress, job_config.training.steps)
            self._open.append(self._progress)
        self.monitor = RankMonitor(job_config, phases)
        if self._progress is not None:
            threading.Thread(target=self._show_phases, name="phases", daemon=True).start()
        self._equal_rewards = EqualRewardsWatch(job_config)
        self._is_chat: bool | None = None
        self._num_retries = 0
        self._who_waits = WhoWaits(job_config)

    def start(self, step: int) -> None:
        """Opens the files. A resumed run continues the files of the run before it."""
        if self._progress is None:
            return
        self.steps = RunLog(self._folder / "metrics.jsonl", step)
        self.evaluations = RunLog(self._folder / "evaluations.jsonl", step)
        self.evaluated = RunLog(self._folder / "evaluation_samples.jsonl", step)
        self._open += [self.steps, self.evaluations, self.evaluated]
        events.begin(self._folder, step)
        if place := wandb_place(self.trackers):
            self._progress.print(place)

    def follow(self, link: RolloutLink | None) -> None:
        """Shows the progress that the rollout process reports."""
        if link is not None and self._progress is not None:
            link.show = self._progress.wait

    def wait(self, line: str, done: int = 0, wanted: int = 0) -> None:
        """Shows the progress of a wait of rank 0; see :meth:`Progress.wait`."""
        if self._progress is not None:
            self._progress.wait(line, done, wanted)

    def wait_push(self, version: int, servers: Mapping[str, Mapping[str, str | int]]) -> None:
        """Shows how many of the publisher's ``servers`` serve ``version`` or a newer one."""
        servers = {url: one for url, one in servers.items() if one["state"] != "asleep"}
        missing = [url for url, state in servers.items() if int(state["version"]) < version]
        done, line = len(servers) - len(missing), f"push of version {version}"
        line += f": {done} of {len(servers)} servers have it"
        line += f"; {missing[0]} is {servers[missing[0]]['state']}" if missing else ""
        self.wait(line, done, len(servers))

    def _show_phases(self) -> None:
        """Shows phases of rank 0 that nobody else reports, before the first step and in evaluations."""
        assert self._progress is not None, "only rank 0 shows phases"
        while not self._ended.wait(1.0):
            facts = self.monitor.phases.health({}).facts
            phase, is_first = facts["phase"], facts["step"] is None
            if phase == "forward and backward" and self._config.compile.enable:
                phase += ": the first step compiles the model"
            if is_first or phase == "evaluating":
                self._progress.wait(phase, only_alone=True)

    def log_step(
        self,
        step: int,
        metrics: dict[str, float],
        samples: Sequence[dict[str, Any]] = (),
        note: str = "",
    ) -> None:
        """Records one step, counted from 1, on rank 0. ``samples`` are its records in ``samples.jsonl``.

        The console shows a ``note`` beside the step.
        """
        if self._progress is None:
            return
        events.step = step
        metrics = metrics | {"memory/peak_gib": take_peak_gib()}
        if (retries := count_allocation_retries()) > self._num_retries:
            logger.warning(
                f"The GPU's memory ran out {retries - self._num_retries} times in step {step}, and the "
                "allocator freed what it kept, which costs time. Lower training.local_batch_size, or set "
                'activation_checkpoint.mode = "full".'
            )
            self._num_retries = retries
        self._who_waits.add(metrics)
        self.monitor.show_step(metrics)
        digits = {key: float(f"{value:.7g}") for key, value in metrics.items()}
        self.steps.add({"step": step, **digits})
        if step == 1 or step % self._config.metrics.log_freq == 0:
            self._track(metrics, step)
            log_samples(self.trackers, samples, step)
        self._progress.update(step, metrics, note)
        for text in itertools.islice(group_texts(samples), self._config.observe.print_samples):
            self._progress.print(text, always=True)
        if samples:
            self._is_chat = samples[0]["is_chat"]
        if notice := self._equal_rewards.update(metrics, self._is_chat):
            logger.warning(notice)

    def log_evaluation(
        self, step: int, result: EvaluationResult, counts: Mapping[str, int]
    ) -> None:
        """Records on rank 0 an evaluation that ended after ``step``. It may be of an older policy version."""
        if self._progress is None:
            return
        metrics = evaluation_metrics(result)
        metrics |= {f"evaluation/{name}": float(count) for name, count in counts.items()}
        self.evaluations.add({"step": result.version, **metrics, "num_prompts": result.num_prompts})
        for record in sample_records(result):
            self.evaluated.add(record)
        self.monitor.latest = {**self.monitor.latest, **metrics}
        # Under the current step: wandb refuses records of an earlier one.
        self._track(metrics, step)
        for line in evaluation_lines(result):
            self._progress.print(line)

    def log_held_out(self, step: int, loss: float) -> None:
        """Records on rank 0 the loss of held-out examples, computed with the weights after ``step``."""
        if self._progress is None:
            return
        metrics = {"evaluation/loss": loss}
        self.evaluations.add({"step": step, **metrics})
        self.monitor.latest = {**self.monitor.latest, **metrics}
        self._track(metrics, step)
        self._progress.print(f"held-out loss at step {step}: {loss:.4f} nats/token")

    def report(self, outcome: RunOutcome) -> None:
        """Writes and prints the summary of a run that has ended, and closes the files, on rank 0."""
        if notice := self._equal_rewards.end(self._is_chat):
            logger.warning(notice)
        steps, evaluations = self.steps.read(), self.evaluations.read()
        is_supervised = self._config.sft.path is not None
        describe = summarize_supervised if is_supervised else summarize
        causes = self._who_waits.causes()  # of the steps, without what follows them
        self._who_waits.add(self.monitor.phases.wall_metrics({}))
        summary = describe(outcome, steps, evaluations)
        summary |= {"wall": self._who_waits.summary(), "causes": causes}
        print(strict_json.dumps(summary, indent=2), flush=True)
        write_summary(self._folder, summary)
        place = wandb_place(self.trackers)
        self.close()
        traces = self._config.profiling.save_traces_folder
        files = [
            name
            for name in ("metrics.jsonl", "samples.jsonl", traces)
            if (path := self._folder / name).exists() and path.stat().st_size > 0
        ]
        print(f"Everything is in {self._folder}: {', '.join(files)}.", flush=True)
        print(f"torchtitan-grpo report {self._folder} writes a page about it.", flush=True)
        if place:
            print(place, flush=True)
        for cause in causes[:2]:
            print(cause["text"], flush=True)

    def _track(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(dict(metrics), step)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        self.monitor.close()
        self._ended.set()
        for part in self._open:
            part.close()
        if self._progress is not None:
            events.close()


def _keep_wandb_offline_without_key() -> None:
    """Sets wandb offline if it has no API key, because it would ask for one on the terminal and wait."""
    if "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ:
        return
    with suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc().authenticators("api.wandb.ai") is not None:
            return
    os.environ["WANDB_MODE"] = "offline"


class RankMonitor:
    """Serves the state of rank 0 over HTTP. The training thread only assigns attributes and never waits."""

    def __init__(self, config: JobConfig, phases: Phases) -> None:
        self._config, self.phases = config, phases
        self.latest: Mapping[str, float] = {}
        self.servers: Callable[[], Mapping[str, Mapping[str, str | int]]] = dict
        self._thread: MonitorThread | None = None

    def show_step(self, metrics: Mapping[str, float]) -> None:
        """Shows a step's metrics. Seconds and shares that it does not have are 0, and are not kept."""
        kept = {k: v for k, v in self.latest.items() if not _OF_ONE_STEP.fullmatch(k)}
        self.latest = {**kept, **metrics}

    def start(self) -> None:
        """Starts to serve if ``observe.monitor`` is set. Raises MonitorError if the address cannot be used."""
        observe = self._config.observe
        if not observe.monitor:
            return
        site = MonitorSite(
            lambda: self.phases.health(self.servers()),
            lambda: {**self.latest, **self.phases.metrics()},
            (observe.monitor_host, observe.monitor_port),
            self._config.job.dump_folder,
            "rank0",
        )
        self._thread = MonitorThread(site)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = None
