# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Planning with a run's settings: what live rollouts and replayed ones have in common."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.tools.logging import logger

from torchtitan.grpo.data.cost import SequenceCost, flops_cost, token_cost
from torchtitan.grpo.data.plan import StepPlan, plan_step
from torchtitan.grpo.data.ptx import PtxStream
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.observe.report import SampleLog
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import RolloutGroup


@dataclass(frozen=True)
class NextStep:
    """A planned step, or a part of one, with what is to be logged of its rollouts.

    Attributes:
        plan: Of the part.
        metrics: Of the whole step; of a step in parts the last one brings them.
        is_first: The step begins with it; what came of a step that had begun is void.
        is_last: The step is whole with it.
    """

    plan: StepPlan
    metrics: dict[str, float]
    is_first: bool = True
    is_last: bool = True


class StepPlanner:
    """Plans steps of a run, supervised rows mixed in where ``grpo.ptx_path`` is set.

    Args:
        config: Of the run.
        model: What is trained.

    Raises:
        DataError: ``grpo.ptx_path`` cannot be used.
    """

    def __init__(self, config: JobConfig, model: HFModel) -> None:
        self._config = config
        self._ptx = _open_ptx(config, model)
        self._cost = _sequence_cost(config, model)

    def plan(
        self, groups: Sequence[RolloutGroup], *, step: int, version: int, num_ranks: int
    ) -> StepPlan:
        """Plans one step.

        Args:
            groups: All groups of the step.
            step: Batches trained on so far; supervised rows go on from there.
            version: What the ages of samples count from.
            num_ranks: Data-parallel degree.
        """
        config = self._config
        ptx = self._ptx.take(step, config.grpo.ptx_per_step) if self._ptx is not None else []
        return plan_step(
            groups,
            config.grpo,
            version=version,
            num_ranks=num_ranks,
            row_len=config.training.seq_len,
            local_batch_size=config.training.local_batch_size,
            max_new_tokens=config.rollout.max_new_tokens,
            balance=config.prompts.balance_batch,
            cost=self._cost,
            row_bucket=config.prompts.row_bucket,
            ptx=ptx,
        )


def open_sample_log(config: JobConfig, start_version: int) -> SampleLog:
    """``samples.jsonl`` in the dump folder, which is made where it is not there."""
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    return SampleLog(folder / "samples.jsonl", config.observe.samples_per_step, start_version)


def _sequence_cost(config: JobConfig, model: HFModel) -> SequenceCost:
    if config.prompts.balance_cost == "tokens":
        return token_cost
    return flops_cost(json.loads((model.path / "config.json").read_text()))


def _open_ptx(config: JobConfig, model: HFModel) -> PtxStream | None:
    path = config.grpo.ptx_path
    if path is None:
        return None
    stream = PtxStream(
        path,
        TextCodec(str(model.path), model.eos_token_ids),
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        row_len=config.training.seq_len,
        seed=config.debug.seed or 0,
    )
    logger.info(
        f"grpo.ptx_path: {len(stream)} rows of {path}; {stream.num_too_long} longer than "
        f"training.seq_len ({config.training.seq_len}) are left out."
    )
    return stream
