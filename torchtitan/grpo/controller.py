# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rank 0's dealings with the rollout process: start, steps, evaluation, samples.

`data/replay.py` has the same surface over a recorded file.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import torch
from torchtitan.tools.logging import logger

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config_manager import JobConfig
from torchtitan.grpo.data.planner import NextStep, StepPlanner, open_sample_log
from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.device import gpus_for_servers
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.rollout.link import EvaluationResult, RolloutLink, ServerInfo
from torchtitan.grpo.weight_sync.build import client_for


class RolloutController:
    """Owns the link to the rollout process and what comes over it. Exists on rank 0 alone.

    Args:
        config: Of the run.
        model: What is trained.
        start_version: Batches already trained on.
        prompt_position: Prompts already used up.
        should_stop: Ends every wait when it turns true.

    Raises:
        DataError: ``grpo.ptx_path`` or ``rollout.record`` cannot be used.

    Attributes:
        prompt_position: Prompts used up with the last batch.
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
        prompt_position: int,
        should_stop: Callable[[], bool],
    ) -> None:
        self.config = config
        self.prompt_position = prompt_position
        self._should_stop = should_stop
        self._planner = StepPlanner(config, model)
        self._recorder: RolloutRecorder | None = None
        if config.rollout.record is not None:
            self._recorder = RolloutRecorder(
                config.rollout.record, model.vocab_size, config.rollout.temperature, start_version
            )
        self.samples = open_sample_log(config, start_version)
        self.link = RolloutLink(_process_config(config, model, start_version, prompt_position))
        self.servers: list[ServerInfo] = []

    def start(self) -> None:
        """Starts the rollout process.

        Returns when servers, prompts and rewards are there, or when asked to stop.
        """
        self.link.start()
        self.servers = self.link.wait_ready(
            self.config.inference.startup_timeout_seconds + 60, self._should_stop
        )

    def next_step(self, version: int, num_ranks: int) -> NextStep | None:
        """The batch that ``version`` is trained on, planned. None when asked to stop."""
        batch = self.link.next_batch(
            version, self.config.rollout.batch_timeout_seconds, self._should_stop
        )
        if batch is None:
            return None
        self.prompt_position = batch.prompt_position
        self.samples.write(version + 1, batch.groups)
        if self._recorder is not None:
            self._recorder.write(version, batch.prompt_position, batch.groups)
        plan = self._planner.plan(batch.groups, step=version, version=version, num_ranks=num_ranks)
        return NextStep(plan, batch.metrics | plan.metrics)

    def evaluate(self, version: int) -> EvaluationResult | None:
        """Scores the held-out prompts under ``version``. None when asked to stop."""
        return self.link.evaluate(
            version, self.config.rollout.batch_timeout_seconds, self._should_stop
        )

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

    def close(self) -> None:
        self.link.close()
        self.samples.close()
        if self._recorder is not None:
            self._recorder.close()


def _process_config(
    config: JobConfig, model: HFModel, start_version: int, prompt_position: int
) -> RolloutProcessConfig:
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
        prompt_position=prompt_position,
    )
