# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Plans the steps of a run from live or replayed rollouts, with the run's settings."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.cost import flops_cost
from torchtitan.grpo.data.ptx import PtxStream
from torchtitan.grpo.data.rows import Sample
from torchtitan.grpo.data.step_plan import StepPlan, plan_step
from torchtitan.grpo.losses.advantages import compute_advantages
from torchtitan.grpo.models.attention_choice import choose_packed_attention
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.observe.sample_log import SampleLog
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import BatchPart, Rollout, RolloutGroup
from torchtitan.grpo.upstream.parallelism import utils

_PADDING = "data/padding_fraction"


@dataclass(frozen=True)
class PlannedPart:
    """The plan of a part of a batch. Only the last part has metrics, which are those of the whole batch."""

    plan: StepPlan
    metrics: dict[str, float]
    part: BatchPart = BatchPart.WHOLE


class StepPlanner:
    """Plans each part of a batch as if it were a separate batch.

    Raises :class:`DataError` if ``grpo.ptx_path``, whose examples are mixed in, cannot be used.
    """

    def __init__(self, config: JobConfig, model: HFModel) -> None:
        self._config = config
        self._ptx = PtxStream(config, model) if config.grpo.ptx_path is not None else None
        self._cost = flops_cost(json.loads((model.path / "config.json").read_bytes()))
        self._row_bucket = _row_bucket(config, model)
        self._parts: list[tuple[Sequence[RolloutGroup], StepPlan]] = []

    @property
    def groups(self) -> list[RolloutGroup]:
        """All groups of the current batch that have been planned, in order of ``group_id``."""
        return sorted(
            (group for groups, _ in self._parts for group in groups), key=lambda g: g.group_id
        )

    @property
    def advantages(self) -> dict[int, list[float | None]]:
        """The advantage of each rollout of the current batch, by ``group_id``; for logs."""
        config = self._config.grpo
        return {
            group_id: values
            for groups, plan in self._parts
            for group_id, values in _advantages_of(groups, plan, config).items()
        }

    @property
    def trained(self) -> set[tuple[int, int]]:
        """The rollouts of the current batch that are trained, as ``group_id`` and place in the group."""
        sources = ((groups, [one.source for one in plan.sequences]) for groups, plan in self._parts)
        return {member for pair in sources for member in _members(*pair)}

    def by_rollout(self, values: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
        """Divides what ranks tell of the current batch's logged tokens among rollouts, as in ``trained``."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for groups, plan in self._parts:
            own, values = np.split(values, [sum(plan.num_logged)], axis=1)
            by_source = plan.by_source(own)
            found |= zip(_members(groups, by_source), by_source.values(), strict=True)
        return found

    def plan(
        self,
        groups: Sequence[RolloutGroup],
        *,
        step: int,
        version: int,
        num_ranks: int,
        part: BatchPart = BatchPart.WHOLE,
    ) -> PlannedPart:
        """Plans one part of a batch. Planning a batch's first part drops the parts of the previous batch.

        ``step`` is the number of batches trained on, which decides the supervised examples to mix in. Ages
        of samples are relative to ``version``.
        """
        if part.begins_batch:
            self._parts = []
        ptx = self._ptx.take(step, self._config.grpo.ptx_per_step) if self._ptx is not None else []
        plan = self._plan(groups, num_ranks, ptx)
        self._parts.append((groups, plan))
        metrics = batch_metrics(self._parts, version) if part.ends_batch else {}
        return PlannedPart(plan, metrics, part)

    def plan_supervised(self, examples: Sequence[Sample], *, num_ranks: int) -> PlannedPart:
        """Plans a batch that holds only supervised examples, one or more for each minibatch."""
        plan = self._plan((), num_ranks, examples)
        # There are no rollouts, so all tokens with a loss are supervised ones.
        plan = replace(plan, num_trained_tokens=sum(plan.minibatch_tokens))
        kept = {
            name: plan.metrics[name] for name in ("data/max_over_mean_cost", "data/rows_per_rank")
        }
        return PlannedPart(plan, kept | {_PADDING: token_metrics([plan])[_PADDING]})

    def _plan(
        self,
        groups: Sequence[RolloutGroup],
        num_ranks: int,
        ptx: Sequence[Sample],
    ) -> StepPlan:
        config = self._config
        plan = plan_step(
            groups,
            config.grpo,
            num_ranks=num_ranks,
            row_len=config.training.seq_len,
            local_batch_size=config.training.local_batch_size,
            max_new_tokens=config.rollout.max_new_tokens,
            balance=config.prompts.balance_batch,
            cost=self._cost,
            row_bucket=self._row_bucket,
            ptx=ptx,
            shares_contexts=config.prompts.share_contexts,
            knows_tokens=config.prompts.single_rank_load,
        )
        return replace(plan, logged_groups=config.observe.samples_per_step)


def batch_metrics(
    parts: Sequence[tuple[Sequence[RolloutGroup], StepPlan]], version: int
) -> dict[str, float]:
    """Combines the metrics of a batch's plans; ages of samples are relative to ``version``."""
    plans = [plan for _, plan in parts]
    rollouts = [r for groups, _ in parts for g in groups for r in g.rollouts]

    def mean(name: str, weights: Sequence[int]) -> float:
        values = [plan.metrics[name] for plan in plans]
        return float(np.average(values, weights=weights if any(weights) else None))

    num_groups = sum(len(groups) for groups, _ in parts)
    num_equal = sum(plan.metrics["reward/equal_groups"] for plan in plans)
    metrics = staleness_metrics([r for r in rollouts if r.reward is not None], version)
    return (
        metrics
        | token_metrics(plans)
        | {
            "reward/equal_groups": num_equal,
            "reward/equal_groups_fraction": num_equal / num_groups,
            "data/filtered_groups_fraction": mean(
                "data/filtered_groups_fraction", [len(groups) for groups, _ in parts]
            ),
            "data/max_over_mean_cost": mean(
                "data/max_over_mean_cost", [p.num_tokens for p in plans]
            ),
            "data/rows_per_rank": sum(plan.metrics["data/rows_per_rank"] for plan in plans),
        }
    )


def token_metrics(plans: Sequence[StepPlan]) -> dict[str, float]:
    num_tokens, num_computed, capacity = (
        sum(getattr(plan, name) for plan in plans)
        for name in ("num_tokens", "num_computed", "capacity")
    )
    return {
        _PADDING: 1 - num_computed / capacity,
        "time/shared_tokens_fraction": 1 - num_computed / num_tokens if num_tokens else 0.0,
    }


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    ages = [version - rollout.oldest_version for rollout in rollouts]
    mixed = [len({segment.version for segment in rollout.segments}) > 1 for rollout in rollouts]
    return {
        "staleness/mixed_version_fraction": float(np.mean(mixed)) if mixed else 0.0,
        "staleness/mean_steps": float(np.mean(ages)) if ages else 0.0,
        "staleness/max_steps": float(max(ages, default=0)),
    }


def open_sample_log(config: JobConfig, model: HFModel, start_version: int) -> SampleLog:
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    per_step = config.observe.samples_per_step
    codec = TextCodec(str(model.path), model.eos_token_ids) if per_step else None
    return SampleLog(folder / "samples.jsonl", per_step, start_version, codec)


def _row_bucket(config: JobConfig, model: HFModel) -> int:
    """Returns 1 if microbatches must be full, because of a pipeline or compiled code; else 0."""
    attention = choose_packed_attention(config, utils.device_type, model.model_args.head_dim)
    is_fixed = (
        config.parallelism.pipeline_parallel_degree > 1
        or config.compile.enable
        or attention == "flex"
    )
    return int(is_fixed)


def _members(groups: Sequence[RolloutGroup], sources: Iterable[int]) -> list[tuple[int, int]]:
    members = [(group.group_id, i) for group in groups for i in range(len(group.rollouts))]
    return [members[source] for source in sources if source >= 0]


def _advantages_of(
    groups: Sequence[RolloutGroup], plan: StepPlan, config: GRPO
) -> dict[int, list[float | None]]:
    """Advantages by ``group_id``, as every rank computes them; None for a rollout that is not trained on.

    All are None with a critic, because tokens then have different advantages, and with the KL penalty in
    the reward, because the penalty is known only after the forward pass of the reference model.
    """
    sizes = [len(group.rollouts) for group in groups]
    values: list[float | None] = [None] * sum(sizes)
    is_known = config.kl_coef == 0 or config.kl_in != "reward"
    if is_known and config.advantage != "gae":
        advantages = compute_advantages(
            plan.samples.rewards,
            plan.samples.group_ids,
            kind=config.advantage,
        )
        for sequence in plan.sequences:
            if sequence.source >= 0:
                values[sequence.source] = float(advantages[sequence.sample_id])
    rest = iter(values)
    return {group.group_id: [next(rest) for _ in group.rollouts] for group in groups}
