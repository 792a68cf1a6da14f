# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Source of live steps: rank 0 starts the rollout process and requests batches from it.

The loops of a run follow: what each consumes, produces and waits for, and what unblocks it. The
training step waits for no server, except at the start and end of a run, and with
``grpo.async_weight_update = false``.

On the training ranks::

    training step        consumes   rows of a batch, or of a part of one (`data/feed.py`)
    `grpo_train.py`      produces   weights in a snapshot slot (`WeightPublisher.publish`)
                         waits for  rank 0's rows; the copy of its own shards (`fence`)
                         unblocked  by the feed; by the copy stream
    feed, on rank 0      consumes   groups from the rollout process (`next_step`, below)
    `data/feed.py`       produces   rows for each rank, packed and balanced (`data/planner.py`)
                         waits for  the rollout process, rollout.batch_timeout_seconds
                         unblocked  by the sender; by a stop or the process's end
    weight publisher     consumes   filled slots
    `weight_sync/`       produces   versions that are whole on the source ranks (`leader.py`)
                         waits for  all ranks' shards; a buffer that no lane sends from any more
                         unblocked  by the ranks' agents; by lanes that finish
    lane, per server     consumes   the newest whole version; it skips older ones
    `weight_sync/lane.py` produces  a served, attested version, and a notice of it or of a loss
                         waits for  its own server, each time with a timeout
                         unblocked  by a newer version; by its server, a timeout or a retry

In the rollout process (`rollout/process.py`), all in one event loop::

    producer             consumes   prompts; restored and overdue groups
    `rollout/producer.py` produces  groups of completions in flight
                         waits for  room under the staleness bound (`admission.py`); a ready server
                         unblocked  by notices of versions; by groups that end or are taken
    dispatcher,          consumes   one completion or segment (`trajectory.py`), with its server
    per completion       produces   tokens and logprobs under attested versions
    `rollout/serving/`   waits for  the server; after its loss, another that is not older
                         unblocked  by an answer, a loss or rollout.request_timeout_seconds
    judge, per group     consumes   the group's completions
    `rollout/judging.py` produces   a finished group, or a reason in the ledger
                         waits for  reward workers; teachers
                         unblocked  by them; by reward.timeout_seconds
    sender               consumes   finished groups, by deadline (`Producer.batch`)
    `rollout/process.py` produces   a batch or a part of one, with the ledger's progress
                         waits for  rank 0's request; the groups that are due
                         unblocked  by groups that end; by rollout.overdue
    supervisor           consumes   ends of launched servers; changes of inference.urls_file
    `serving/fleet.py`   produces   restarted servers; the new list for dispatcher and lanes
                         waits for  the next end or change
                         unblocked  by polls of processes, files and registrations
    lender               consumes   the training devices, which rank 0 frees while it waits
    `rollout/lending/`   produces   lent servers that serve or sleep (``inference.lend``)
                         waits for  rank 0's notice; the lanes; servers that fall asleep
                         unblocked  by them; by inference.sleep_timeout_seconds, then it kills
    evaluations          consumes   rank 0's request, held-out prompts, places that rollouts leave
    `rollout/evaluator`  produces   scores of one version
                         waits for  a server of that version or a newer one
                         unblocked  by notices of versions; by rollouts that end
"""

import asyncio
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import warnings_of
from torchtitan.grpo.data.feed import FetchAddress
from torchtitan.grpo.data.planner import PlannedPart
from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.data.replay import ReplaySource
from torchtitan.grpo.data.step_source import StepSource
from torchtitan.grpo.data.supervised import SupervisedSource
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.local_servers import set_random_keys
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.rollout.drops import run_summary
from torchtitan.grpo.rollout.link import RolloutFailed, RolloutKilled, RolloutLink
from torchtitan.grpo.rollout.results import EvaluationResult
from torchtitan.grpo.rollout.saved import discard_after, file_of
from torchtitan.grpo.run_folder.contents import steps_in
from torchtitan.grpo.system.cpu_speed import FAST, bfloat16_speedup
from torchtitan.grpo.system.device import num_training_gpus, visible_gpus
from torchtitan.grpo.system.groups import leader_address
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.training.lent_memory import lent_part
from torchtitan.grpo.training.loan import Loan
from torchtitan.grpo.types import PromptProgress, ServerInfo
from torchtitan.grpo.weight_sync.build import client_for

LEDGER_FILE = "ledger.jsonl"

_Answer = TypeVar("_Answer")


def open_step_source(
    config: JobConfig,
    model: HFModel,
    *,
    start_version: int,
    progress: PromptProgress,
    date: str,
    should_stop: Callable[[], bool],
    on_hangup: Callable[[Callable[[], None]], None],
    loan: Loan,
    uses_kept_rollouts: bool = True,
) -> StepSource:
    """Constructs the source of the run's steps without starting it. Raises :class:`DataError`.

    ``on_hangup`` registers a function to be called at SIGHUP; the function rereads ``inference.urls_file``.
    """
    arguments: dict[str, Any] = {
        "start_version": start_version,
        "progress": progress,
        "should_stop": should_stop,
    }
    if config.sft.path is not None:
        return SupervisedSource(config, model, **arguments, date=date)
    if config.rollout.replay is not None:
        return ReplaySource(config, model, **arguments)
    controller = RolloutController(
        config,
        model,
        **arguments,
        date=date,
        loan=loan,
        uses_kept_rollouts=uses_kept_rollouts,
    )
    if config.inference.urls_file:
        on_hangup(controller.link.reread_urls)
    return controller


class RolloutController(StepSource):
    """Plans batches of rollouts that the rollout process sends; see :class:`StepSource`.

    The run has been trained on ``start_version`` batches. ``should_stop`` is polled during every
    wait. With ``uses_kept_rollouts``, the run continues with rollouts saved beside its checkpoint.
    ``date`` is the current date for chat templates, in ISO format. ``servers`` are those at the
    start; ``link.watch`` has later ones.

    If training devices are lent to servers, they must be free when the source is started. Later the
    training thread lends them again while it waits for a batch of which nothing has arrived.
    """

    def __init__(
        self,
        config: JobConfig,
        model: HFModel,
        *,
        start_version: int,
        progress: PromptProgress,
        date: str,
        should_stop: Callable[[], bool],
        loan: Loan,
        uses_kept_rollouts: bool = True,
    ) -> None:
        self._unused_version = -1 if uses_kept_rollouts else start_version
        self._recorder: RolloutRecorder | None = None
        if config.rollout.record is not None:
            self._recorder = RolloutRecorder(
                config.rollout.record, model.vocab_size, config.rollout.temperature, start_version
            )
        super().__init__(config, model, start_version, progress, should_stop)
        self._ledger = RunLog(Path(config.job.dump_folder) / LEDGER_FILE, start_version)
        # Rollouts saved with later checkpoints belong to steps that this run takes again.
        discard_after(config.job.dump_folder, start_version)
        self._model, self._start_version, self._date = model, start_version, date
        self._is_ready = self._is_closed = False
        self._fetch_secret = secrets.token_hex(16)
        set_random_keys(config.inference, os.environ)
        self.link: RolloutLink = RolloutLink(self._process_config(start_version), logger.warning)
        self._loan = loan
        loan.notify = lambda version: self.link.notify_devices_free(version)

    def start(self) -> None:
        """Starts the rollout process, and waits until it is ready or the run is asked to stop."""
        for warning in (*warnings_of(self.config), *_slow_bfloat16(self.config)):
            logger.warning(warning)
        self.link.start()
        self._despite_kills(self._start_version, lambda: None)

    def next_step(self, version: int, num_ranks: int) -> PlannedPart | None:
        """Plans the next part of a batch, or its first part again if the rollout process was killed."""
        timeout = self.config.rollout.batch_timeout_seconds
        batch = self._despite_kills(
            version,
            lambda: self.link.next_batch(
                version, timeout, self._should_stop, lambda: self._loan.before_wait(version)
            ),
        )
        if batch is None:
            return None
        self.on_arrival()
        step = self._planner.plan(
            batch.groups, part=batch.part, step=version, version=version, num_ranks=num_ranks
        )
        if not batch.part.ends_batch:
            return step
        groups = self._planner.groups
        self.progress = batch.progress
        trained = {group.group_id: group.row for group in groups}
        self._ledger.add(
            {
                "step": version + 1,
                "trained": list(trained),
                "closed": {str(index): reason for index, reason in batch.closed.items()},
                "rows": {str(i): row for i, row in (trained | batch.rows).items()},
                "position": batch.progress.position,
                "open": list(batch.progress.open),
            }
        )
        self._hold_samples(version + 1)
        if self._recorder is not None:
            self._recorder.write(version, batch.progress, groups)
        return replace(step, metrics=batch.metrics | step.metrics)

    def fetch_address(self, version: int) -> FetchAddress | None:
        endpoint = self.link.fetch_endpoint
        return FetchAddress(endpoint, self._fetch_secret, version) if endpoint is not None else None

    @property
    def is_evaluating(self) -> bool:
        return self.link.is_evaluating

    def request_evaluation(self, version: int, pinned: Sequence[str] = ()) -> bool:
        # If the process was killed, the request for the next batch restarts it, and renews this one.
        with suppress(RolloutKilled):
            self.link.request_evaluation(version, pinned)
        return True

    def take_evaluation(self) -> EvaluationResult | None:
        with suppress(RolloutKilled):
            if self._is_ready and self.link.is_evaluating:
                return self.link.take_evaluation()
        return None

    def wait_evaluation(self, version: int) -> EvaluationResult | None:
        if not self.link.is_evaluating:
            return None
        timeout = self.config.evaluation.timeout_seconds
        return self._despite_kills(
            version, lambda: self.link.wait_evaluation(timeout, self._should_stop)
        )

    def save(self, step: int) -> None:
        # If the process was killed, the request for the next batch will notice and restart it.
        with suppress(RolloutKilled):
            if self._is_ready:
                checkpoints = Path(self.config.job.dump_folder) / self.config.checkpoint.folder
                self.link.save(step, steps_in(checkpoints))

    def wait_saved(self, step: int, timeout_seconds: float) -> int | None:
        if not self._is_ready:
            return 0  # nothing was in flight yet, and :meth:`save` has requested nothing
        with suppress(RolloutFailed):
            return self.link.wait_saved(step, timeout_seconds)
        return None

    def _despite_kills(self, version: int, ask: Callable[[], _Answer]) -> _Answer | None:
        """Calls ``ask``. If the rollout process is killed, restarts the process and calls ``ask`` again."""
        while True:
            try:
                if not self._is_ready:
                    self._wait_ready()
                return None if self._should_stop() else ask()
            except RolloutKilled as kill:
                self._is_ready = False
                if self._should_stop():
                    return None
                logger.error(f"{kill}\nThe rollout process is restarted, from batch {version} on.")
                if self._loan.until is None:
                    # The new process launches servers. An incomplete batch begins again.
                    self._loan.make_room(version)
                self.link.restart(self._process_config(version))

    def _process_config(self, version: int) -> RolloutProcessConfig:
        config = process_config(
            self.config, self._model, version, self.progress, self._fetch_secret, self._date
        )
        if self.config.inference.launch and self.config.inference.dtype == "auto":
            # Measured on a CPU, so another start may decide otherwise.
            logger.info("Launched servers compute in %s (inference.dtype).", config.inference.dtype)
        return replace(config, saved_rollouts=None) if version == self._unused_version else config

    def _wait_ready(self) -> None:
        timeout = self.config.inference.startup_timeout_seconds + 60
        self.servers = self.link.wait_ready(timeout, self._should_stop)
        for warning in self.link.warnings:
            logger.warning(warning)
        self._is_ready = True
        if not self._should_stop():
            self._loan.tell()
            self.link.renew_evaluation()

    def served_version(self) -> int:
        """Returns the lowest version that servers report, or -1 if no server answers."""

        async def ask(server: ServerInfo) -> int | None:
            client = client_for(self.config.inference, server)
            try:
                return await client.version()
            except ServerError as error:
                logger.warning(f"{server.url} does not report the version it serves: {error}")
                return None
            finally:
                await client.close()

        async def ask_all() -> list[int | None]:
            return await asyncio.gather(*(ask(server) for server in self.link.watch.servers()))

        return min((v for v in asyncio.run(ask_all()) if v is not None), default=-1)

    def attend(self) -> None:
        # If the process was killed, the request for the next batch will notice and restart it.
        with suppress(RolloutKilled):
            if self._is_ready:
                self.link.raise_if_ended(wait_milliseconds=0)

    def raise_if_ended(self) -> None:
        self.link.raise_if_ended()

    def close(self) -> None:
        self.link.close()
        if not self._is_closed and (summary := run_summary(self.link.dropped)):
            logger.warning(summary)
        self._is_closed = True
        try:
            super().close()
        finally:
            self._ledger.close()
            if self._recorder is not None:
                self._recorder.close()


def _server_device(config: JobConfig) -> Literal["cpu", "cuda"]:
    if config.inference.device != "auto":
        return config.inference.device
    # As in the trainer, torch decides: a CPU build of torch cannot use a GPU.
    return "cuda" if torch.cuda.is_available() else "cpu"


def _slow_bfloat16(config: JobConfig) -> Iterator[str]:
    """Warns if the model is trained on a CPU without fast bfloat16; `check-config` may run elsewhere."""
    trains_in_it = config.training.mixed_precision_param == "bfloat16"
    if trains_in_it and not torch.cuda.is_available() and bfloat16_speedup() <= 1.0:
        yield (
            "This CPU computes bfloat16 no faster than float32, and without the instructions many times "
            'slower. Set training.mixed_precision_param = "float32".'
        )


def server_dtype(config: JobConfig) -> Literal["auto", "float32", "bfloat16"]:
    """Resolves ``inference.dtype = "auto"`` once, so that all launched servers use the same type."""
    if config.inference.dtype != "auto" or not config.inference.launch:
        return config.inference.dtype
    if _server_device(config) == "cuda":
        return "bfloat16"
    trains_in_it = config.training.mixed_precision_param == "bfloat16"
    return "bfloat16" if trains_in_it and bfloat16_speedup() >= FAST else "float32"


def process_config(
    config: JobConfig,
    model: HFModel,
    start_version: int,
    progress: PromptProgress,
    fetch_secret: str,
    date: str = "",
) -> RolloutProcessConfig:
    saved = file_of(config.job.dump_folder, start_version)
    return RolloutProcessConfig(
        grpo=config.grpo,
        prompts=config.prompts,
        rollout=config.rollout,
        agent=config.agent,
        inference=replace(
            config.inference, device=_server_device(config), dtype=server_dtype(config)
        ),
        reward=config.reward,
        workers=config.workers,
        teacher=config.teacher,
        evaluation=config.evaluation,
        environments=config.environments,
        hf_assets_path=str(model.path),
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_ids),
        seq_len=config.training.seq_len,
        seed=config.debug.seed or 0,
        dump_folder=config.job.dump_folder,
        gpus=visible_gpus(),
        num_training_gpus=num_training_gpus(),
        cluster=config.cluster,
        lent_part=lent_part(config, model),
        start_version=start_version,
        progress=progress,
        num_steps=config.training.steps,
        date=date,
        # Deterministic completions come out the same when they are generated again; those of a
        # file would have been written by other members of their group than in a run without a stop.
        saved_rollouts=(
            str(saved) if saved.is_file() and not config.rollout.deterministic else None
        ),
        samples_per_step=config.observe.samples_per_step,
        monitor_host=config.observe.monitor_host if config.observe.monitor else "",
        monitor_port=config.observe.monitor_port and config.observe.monitor_port + 1,
        stuck_seconds=config.observe.stuck_seconds,
        timeline=config.observe.timeline,
        fetch_host=leader_address(),
        fetch_secret=fetch_secret,
    )
