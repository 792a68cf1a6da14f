# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rank 0's dealings with the rollout process: start, steps, evaluation, samples.

`data/replay.py` has the same surface over a recorded file.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torchtitan.tools.logging import logger

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.data.feed import FetchAddress
from torchtitan.grpo.data.planner import PlannedPart, StepPlanner, open_sample_log
from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.data.replay import ReplaySource
from torchtitan.grpo.data.step_source import StepSource
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.rollout.link import RolloutKilled, RolloutLink
from torchtitan.grpo.rollout.results import EvaluationResult, RolloutBatch
from torchtitan.grpo.rollout.saved import discard_after, file_of
from torchtitan.grpo.system.device import gpus_for_servers
from torchtitan.grpo.system.groups import leader_address
from torchtitan.grpo.types import PromptProgress, RolloutGroup, ServerInfo
from torchtitan.grpo.weight_sync.build import client_for

LEDGER_FILE = "ledger.jsonl"

_Answer = TypeVar("_Answer")


def open_step_source(
    config: JobConfig,
    model: HFModel,
    *,
    start_version: int,
    progress: PromptProgress,
    should_stop: Callable[[], bool],
    on_hangup: Callable[[Callable[[], None]], None],
) -> StepSource:
    """Constructs the source of the run's steps, which is not started yet.

    Args:
        config: Configuration of the run. ``rollout.replay`` chooses the source.
        model: The model that is trained.
        start_version: Number of batches that the run has been trained on so far.
        progress: Progress through the prompts so far.
        should_stop: Polled during every wait; the wait ends once it returns True.
        on_hangup: Registers what SIGHUP calls. With ``inference.urls_file`` it reads that file
            again.

    Raises:
        DataError: If ``grpo.ptx_path``, ``rollout.record`` or ``rollout.replay`` is unusable.
    """
    arguments: dict[str, Any] = {
        "start_version": start_version,
        "progress": progress,
        "should_stop": should_stop,
    }
    if config.rollout.replay is not None:
        return ReplaySource(config, model, **arguments)
    controller = RolloutController(config, model, **arguments)
    if config.inference.urls_file:
        on_hangup(controller.link.reread_urls)
    return controller


class RolloutController(StepSource):
    """Owns the link to the rollout process and what comes over it. Exists on rank 0 alone.

    Args:
        config: Of the run.
        model: What is trained.
        start_version: Batches already trained on.
        progress: Of the prompts until now.
        should_stop: Ends every wait when it turns true.

    Raises:
        DataError: ``grpo.ptx_path`` or ``rollout.record`` cannot be used.

    Attributes:
        progress: Of the prompts with the last batch.
        is_exhausted: Never: prompts come round again.
        link: To the rollout process.
        servers: Those of the start, known once started; ``link.watch`` knows those of now.
    """

    is_exhausted = False

    def __init__(
        self,
        config: JobConfig,
        model: HFModel,
        *,
        start_version: int,
        progress: PromptProgress,
        should_stop: Callable[[], bool],
    ) -> None:
        self.config = config
        self.progress = progress
        self._should_stop = should_stop
        self._planner = StepPlanner(config, model)
        self._recorder: RolloutRecorder | None = None
        if config.rollout.record is not None:
            self._recorder = RolloutRecorder(
                config.rollout.record, model.vocab_size, config.rollout.temperature, start_version
            )
        self.samples = open_sample_log(config, start_version)
        self._ledger = RunLog(Path(config.job.dump_folder) / LEDGER_FILE, start_version)
        # Later ones are of a future that this run may not come to again.
        discard_after(config.job.dump_folder, start_version)
        self._model, self._start_version = model, start_version
        self._is_ready = False
        self._fetch_secret = secrets.token_hex(16)
        self.link: RolloutLink = RolloutLink(self._process_config(start_version))
        self.servers: list[ServerInfo] = []

    def start(self) -> None:
        """Starts the rollout process.

        Returns when servers, prompts and rewards are there, or when asked to stop.
        """
        self.link.start()
        self._despite_kills(self._start_version, lambda: None)

    def next_step(self, version: int, num_ranks: int) -> PlannedPart | None:
        """The batch that ``version`` is trained on, or the next part of it, planned.

        None when asked to stop. Where the rollout process was killed amid a batch, the next
        part is the first one of that batch anew.
        """
        timeout = self.config.rollout.batch_timeout_seconds
        batch = self._despite_kills(
            version, lambda: self.link.next_batch(version, timeout, self._should_stop)
        )
        if batch is None:
            return None
        step = self._planner.plan(
            batch.groups,
            part=batch.part,
            step=version,
            version=version,
            num_ranks=num_ranks,
        )
        if not batch.part.ends_batch:
            return step
        groups = self._planner.groups
        self.progress = batch.progress
        self._ledger.add(ledger_record(version + 1, batch, groups))
        self.samples.write(version + 1, groups)
        if self._recorder is not None:
            self._recorder.write(version, batch.progress, groups)
        return replace(step, metrics=batch.metrics | step.metrics)

    def fetch_address(self, version: int) -> FetchAddress | None:
        """Where ranks fetch the batch of ``version``; None where they are sent their rows."""
        endpoint = self.link.fetch_endpoint
        return FetchAddress(endpoint, self._fetch_secret, version) if endpoint is not None else None

    def evaluate(self, version: int) -> EvaluationResult | None:
        """Scores the held-out prompts under ``version``. None when asked to stop."""
        timeout = self.config.rollout.batch_timeout_seconds
        return self._despite_kills(
            version, lambda: self.link.evaluate(version, timeout, self._should_stop)
        )

    def save(self, step: int) -> None:
        """Has what is in flight kept with the checkpoint of ``step``; does not wait for it."""
        # A process that was killed is found to be so when it is asked for the next batch.
        with suppress(RolloutKilled):
            self.link.save(step, checkpointed_steps(self.config))

    def _despite_kills(self, version: int, ask: Callable[[], _Answer]) -> _Answer | None:
        """Asks again, of another rollout process, where the one that was asked is killed."""
        while True:
            try:
                if not self._is_ready:
                    self._wait_ready()
                return None if self._should_stop() else ask()
            except RolloutKilled as kill:
                self._is_ready = False
                if self._should_stop():
                    return None
                logger.error(f"{kill}\nIt is started again from batch {version} on.")
                self.link.restart(self._process_config(version))

    def _process_config(self, version: int) -> RolloutProcessConfig:
        """For a rollout process that begins after ``version`` batches."""
        return process_config(self.config, self._model, version, self.progress, self._fetch_secret)

    def _wait_ready(self) -> None:
        timeout = self.config.inference.startup_timeout_seconds + 60
        self.servers = self.link.wait_ready(timeout, self._should_stop)
        for warning in self.link.warnings:
            logger.warning(warning)
        self._is_ready = True

    def served_version(self) -> int:
        """The lowest version that servers say they serve; those that do not answer are left out."""

        async def ask(server: ServerInfo) -> int | None:
            client = client_for(self.config.inference, server)
            try:
                return await client.version()
            except ServerError as error:
                logger.warning(f"{server.url} does not say what it serves: {error}")
                return None
            finally:
                await client.close()

        async def ask_all() -> list[int | None]:
            return await asyncio.gather(*(ask(server) for server in self.link.watch.servers()))

        return min((v for v in asyncio.run(ask_all()) if v is not None), default=-1)

    def raise_if_ended(self) -> None:
        self.link.raise_if_ended()

    def close(self) -> None:
        self.link.close()
        self.samples.close()
        self._ledger.close()
        if self._recorder is not None:
            self._recorder.close()


def ledger_record(step: int, batch: RolloutBatch, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """A line of ``ledger.jsonl``: what became of prompts with the batch of ``step``.

    Args:
        step: That it was trained in.
        batch: The whole batch, or its last part.
        groups: All that it was trained on.
    """
    return {
        "step": step,
        "trained": [group.group_id for group in groups],
        "closed": {str(index): reason for index, reason in batch.closed.items()},
        "position": batch.progress.position,
        "open": list(batch.progress.open),
    }


def checkpointed_steps(config: JobConfig) -> list[int]:
    """Steps of which a checkpoint is there."""
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def process_config(
    config: JobConfig,
    model: HFModel,
    start_version: int,
    progress: PromptProgress,
    fetch_secret: str,
) -> RolloutProcessConfig:
    """What the rollout process is given, to begin after ``start_version`` batches."""
    saved = file_of(config.job.dump_folder, start_version)
    device = config.inference.device
    if device == "auto":
        # Asked of torch, as for the trainer: a CPU build of torch cannot use a GPU.
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return RolloutProcessConfig(
        grpo=config.grpo,
        prompts=config.prompts,
        rollout=config.rollout,
        inference=replace(config.inference, device=device),
        reward=config.reward,
        evaluation=config.evaluation,
        hf_assets_path=str(model.path),
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_ids),
        seq_len=config.training.seq_len,
        seed=config.debug.seed or 0,
        dump_folder=config.job.dump_folder,
        server_gpus=gpus_for_servers()[0],
        start_version=start_version,
        progress=progress,
        saved_rollouts=str(saved) if saved.is_file() else None,
        fetch_host=leader_address(),
        fetch_secret=fetch_secret,
    )
