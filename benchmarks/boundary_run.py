# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the ranks of `boundary_stall.py`: the real trainer on one batch of invented rollouts.

    torchrun --nproc_per_node=2 benchmarks/boundary_run.py JOB.json

The model, the loss, the optimizer and the weight push are the trainer's own, and the servers are
real. Only the rollouts are the same in every step, so that the trainer waits for nothing except
what is measured.
"""

# ruff: noqa: E402  (the device is settled before torchtitan's modules read it)

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.grpo.system.child import die_with_parent
from torchtitan.grpo.system.device import settle_device

settle_device()

import numpy as np
import torch.distributed as dist

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.planner import PlannedPart, StepPlanner
from torchtitan.grpo.data.step_source import StepSource
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.observe.profiling import StepClock
from torchtitan.grpo.observe.sample_log import SampleLog
from torchtitan.grpo.rollout.rollout_metrics import group_metrics
from torchtitan.grpo.start.entry import leave, run
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.types import PromptProgress, Rollout, RolloutGroup, ServerInfo, VersionSegment
from torchtitan.grpo_train import GRPOTrainer

_PROMPT_TOKENS = 8
_PARTS = ("reserve_slot", "publish", "fence")
"""What the training thread asks of the publisher in every step."""
_FLOOR_NANOSECONDS = 100_000


class SameServers:
    """Takes the place of the link's watch of the servers."""

    def poll(self) -> None:
        """The servers never change."""


class RecordingLink:
    """Takes the place of the link to the rollout process, and records the publisher's reports."""

    def __init__(self) -> None:
        self.watch = SameServers()
        self.confirmed: list[tuple[float, str, int]] = []
        self.lost: list[tuple[float, str, str]] = []

    def notify_version(self, url: str, version: int, pause_seconds: float) -> None:
        self.confirmed.append((time.monotonic(), url, version))

    def notify_asleep(self, url: str) -> None:
        raise AssertionError("no server is lent")

    def notify_lost(self, url: str, reason: str) -> None:
        self.lost.append((time.monotonic(), url, reason))

    def raise_if_ended(self) -> None:
        """Does nothing: there is no rollout process."""


class CannedRollouts(StepSource):
    """Takes the place of `controller.RolloutController`: every step gets the same batch.

    Each rollout fills a row, and each rank gets ``grpo.prompts_per_step`` of them.
    """

    is_exhausted = False
    progress = PromptProgress()

    def __init__(self, config: JobConfig, model: HFModel) -> None:
        self.link: Any = RecordingLink()
        self.servers = [ServerInfo(url, config.inference.kind) for url in config.inference.urls]
        self.samples = SampleLog(Path(config.job.dump_folder, "samples.jsonl"), 0, 0, None)
        self._planner = StepPlanner(config, model)
        self._groups = random_groups(config, model.vocab_size)
        self._step: PlannedPart | None = None

    def next_step(self, version: int, num_ranks: int) -> PlannedPart:
        if self._step is None:
            step = self._planner.plan(self._groups, step=0, version=0, num_ranks=num_ranks)
            self._step = replace(step, metrics=group_metrics(self._groups) | step.metrics)
        return self._step

    def start(self) -> None:
        """Does nothing: the batch is made by the constructor."""

    def close(self) -> None:
        """Does nothing: nothing was started."""


def random_groups(config: JobConfig, vocab_size: int) -> list[RolloutGroup]:
    """Returns groups of two rollouts with random logprobs. Each rollout is as long as a row."""
    random = np.random.default_rng(0)
    length = config.training.seq_len - _PROMPT_TOKENS

    def tokens(count: int) -> np.ndarray:
        return random.integers(1, vocab_size, count).astype(np.int32)

    groups = []
    for group_id in range(config.grpo.prompts_per_step):
        prompt = tokens(_PROMPT_TOKENS)
        rollouts = [
            Rollout(
                prompt_ids=prompt,
                token_ids=tokens(length),
                logprobs=np.full(length, -np.log(vocab_size), np.float32),
                segments=(VersionSegment(0, 0, length),),
                finish_reason="length",
                completion="",
                reward=float(reward),
            )
            for reward in range(config.grpo.group_size)
        ]
        groups.append(RolloutGroup(group_id, "", tuple(rollouts), "http://127.0.0.1:1"))
    return groups


class SchedulerClock:
    """Measures how long this thread has computed and how long it has waited for a core.

    During the rest of a duration the thread slept: in a lock, or waiting for the interpreter.
    """

    def __init__(self) -> None:
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._file = os.open(path, os.O_RDONLY)

    def read(self) -> tuple[int, int]:
        """Returns both times in nanoseconds. The call takes a few microseconds."""
        queued = int(os.pread(self._file, 64, 0).split()[1])
        return time.thread_time_ns(), queued


class KeepingClock(StepClock):
    """Keeps the times of the step that ended last.

    Attributes:
        times: See :meth:`StepClock.end_step`.
        computed: Nanoseconds of the current step's stall in which the thread computed.
        queued: Nanoseconds of the current step's stall in which the thread waited for a core.
    """

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, float] = {}
        self.computed = self.queued = 0
        self._scheduler = SchedulerClock()

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        if part != "boundary_stall":
            with super().measure(part):
                yield
            return
        # Read outside of the measurement, because reading takes some microseconds itself.
        with self.scheduling(), super().measure(part):
            yield

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """Adds the times that the scheduler reports for the block."""
        computed, queued = self._scheduler.read()
        yield
        computed_now, queued_now = self._scheduler.read()
        self.computed += computed_now - computed
        self.queued += queued_now - queued

    def end_step(self) -> dict[str, float]:
        self.times = super().end_step()
        return self.times

    def take_scheduling(self) -> dict[str, float]:
        """Returns the seconds computed and queued since the last call."""
        taken = {"computed": self.computed / 1e9, "queued": self.queued / 1e9}
        self.computed = self.queued = 0
        return taken


class BoundaryTrainer(GRPOTrainer):
    """Trains on prepared rollouts and records the cost of each step boundary.

    Attributes:
        records: One record for each step, with its number, its times in seconds and, on rank 0, the
            last push to each server.
    """

    source: CannedRollouts | None  # pyright: ignore[reportIncompatibleVariableOverride]
    clock: KeepingClock

    def __init__(
        self, config: JobConfig, hf_model: HFModel, stop: StopRequest, channel: RankChannel
    ) -> None:
        super().__init__(config, hf_model, stop, channel)
        self.clock = KeepingClock()
        self.records: list[dict[str, Any]] = []
        self.parts: dict[str, float] = {}
        self.published_at = self.floor = 0.0
        self.learner.learn = self._measured_after(self.learner.learn)

    def _start_rollouts(self) -> None:
        self.source = CannedRollouts(self.config, self.hf_model)

    def _reserve_slot(self) -> int:
        # The boundary's clock does not measure this part of the stall.
        with self.clock.scheduling():
            return super()._reserve_slot()

    def _build_publisher(self):
        publisher = super()._build_publisher()
        for name in _PARTS:
            setattr(publisher, name, self._timed(name, getattr(publisher, name)))
        return publisher

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = (time.perf_counter_ns() - begin) / 1e9
                self.parts[name] = self.parts.get(name, 0.0) + seconds
                if name == "publish":
                    self.published_at = time.monotonic()

        return timed

    def _measured_after(self, learn: Callable[..., Any]) -> Callable[..., Any]:
        def learn_and_measure(*args: Any) -> Any:
            learned = learn(*args)
            # Measured right before publishing, so that it has the same work before it and the same
            # part of the thread's time slice.
            self.floor = computing_seconds(_FLOOR_NANOSECONDS)
            return learned

        return learn_and_measure

    def _log_step(self, *args: Any) -> None:
        super()._log_step(*args)
        times = self.clock.times
        self.records.append(
            {
                "step": self.step,
                "published_at": self.published_at,
                "step_seconds": times["time/step_seconds"],
                # The metric does not include the reservation of a slot.
                "stall_seconds": times["time/boundary_stall_seconds"]
                + self.parts.get("reserve_slot", 0.0),
                **{name: self.parts.get(name, 0.0) for name in _PARTS},
                **self.clock.take_scheduling(),
                "floor": self.floor,
                "is_attested": self.publisher.is_attested(self.step),
            }
        )
        self.parts.clear()
        if self.is_rank_zero:
            self.records[-1] |= {"push_seconds": push_seconds(self.publisher)}
            os.write(_steps_pipe(), f"{self.step}\n".encode())

    def _finish(self) -> None:
        """Writes the records; exports and evaluates nothing."""
        result: dict[str, Any] = {"records": self.records}
        if self.source is not None:
            link = self.source.link
            result |= {"confirmed": link.confirmed, "lost": link.lost}
            result["metrics"] = self.publisher.metrics()
        folder = Path(self.config.job.dump_folder)
        (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(result))


def take_core(rank: int, num_ranks: int) -> None:
    """Binds this process to a core of its own, as launchers do with ranks.

    Launchers offer ``numactl --physcpubind`` and ``torchrun --numa-binding`` for this. Otherwise
    Linux may let two ranks share a core for milliseconds while another core is idle, and the
    background work of one rank may take the core of another rank's training thread. The training
    threads of the ranks are the only ones that are not scheduled as batch work.
    """
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= num_ranks:
        os.sched_setaffinity(0, {cores[rank]})


def computing_seconds(nanoseconds: int) -> float:
    """Returns how long this thread takes for a fixed computation, interruptions included."""
    begin, computed = time.perf_counter_ns(), time.thread_time_ns()
    while time.thread_time_ns() - computed < nanoseconds:
        pass
    return (time.perf_counter_ns() - begin) / 1e9


def push_seconds(publisher: Any) -> dict[str, list[float]]:
    """Returns the version and the seconds of the last push to each server."""
    return {
        lane.url: [lane.last_push.version, lane.last_push.push_seconds]
        for lane in publisher.lanes
        if lane.last_push is not None
    }


def _steps_pipe() -> int:
    """Returns the pipe through which the driver learns which step has ended."""
    global _pipe
    if _pipe is None:
        _pipe = os.open(_job["steps_pipe"], os.O_WRONLY)
    return _pipe


_pipe: int | None = None
_job: dict[str, Any] = {}


def main() -> int:
    die_with_parent()
    take_core(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    _job.update(json.loads(Path(sys.argv[1]).read_text()))
    return run(BoundaryTrainer, _job["args"])


if __name__ == "__main__":
    leave(main)
