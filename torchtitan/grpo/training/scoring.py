# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Scoring, advantages and losses of a batch.

    minibatches, samples -> score (reference, proximal policy, critic) -> advantages -> losses

Nothing here depends on the layout: runners return whole rows on the ranks that see the output.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from torchtitan.grpo.config import GRPO, Teacher
from torchtitan.grpo.data.feed import Feed, TrainBatch
from torchtitan.grpo.data.rows import COLUMNS, TrainRows
from torchtitan.grpo.data.step_plan import SampleTable
from torchtitan.grpo.losses.advantages import compute_advantages
from torchtitan.grpo.losses.distillation import (
    TopLogprobs,
    group_baselines,
    sample_sums,
    sampled_reverse_kl,
    with_teacher,
)
from torchtitan.grpo.losses.gae import mean_and_variance
from torchtitan.grpo.losses.kl import sample_kl_sums
from torchtitan.grpo.losses.loss_metrics import Metric
from torchtitan.grpo.losses.objective import LossInputs, objective
from torchtitan.grpo.training.critic import NUM_MOMENTS, Critic, estimate
from torchtitan.grpo.training.reference import BaseReference, Reference
from torchtitan.grpo.training.runner import ForwardJob, ForwardRunner, ModelRunner
from torchtitan.grpo.training.trainee import Minibatch, ScoredRows, TraineeLoss, ValueTargets
from torchtitan.grpo.types import NO_TOKEN


class MinibatchLoss(TraineeLoss):
    """The policy's loss; ``teacher`` is set if a teacher may have rated rollouts."""

    def __init__(
        self, scored: ScoredRows, config: GRPO, scale: float = 1.0, teacher: Teacher | None = None
    ) -> None:
        super().__init__(scale)
        self.scored, self.config, self.teacher = scored, config, teacher

    def compute(
        self, output: torch.Tensor, which: slice
    ) -> tuple[torch.Tensor, Mapping[str, Metric]]:
        """Takes ``output`` [rows, seq, 2 + k]: logprobs, entropies, and logprobs of the teacher's tokens."""
        rows = self.scored.rows.select(which)
        top = None
        if "teacher_top_ids" in rows.columns:
            output, of_teacher = output.tensor_split((2,), dim=-1)
            is_rated = rows.columns["teacher_top_ids"][..., 0] != NO_TOKEN
            top = TopLogprobs(of_teacher, rows.columns["teacher_top_logprobs"], is_rated)
        logprobs, entropy = output.unbind(-1)
        old, ref = self.scored.old_logprobs, self.scored.ref_logprobs
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=logprobs.detach() if old is None else old[which],
            generator_logprobs=rows.generator_logprobs,
            ref_logprobs=None if ref is None else ref[which],
            advantages=rows.advantages,
            loss_mask=rows.loss_mask,
            loss_weights=rows.loss_weights,
            ptx_weights=rows.ptx_weights,
            sequence_ids=rows.sequence_ids,
            teacher_top=top,
            columns=rows.columns,
        )
        if self.scored.logged is not None:
            log_ratios = inputs.old_logprobs - inputs.generator_logprobs
            self.scored.logged.keep(which, torch.stack([log_ratios, inputs.advantages]))
        return objective(inputs, self.config, self.teacher)


def with_top_k(rows: TrainRows, top_k: int) -> TrainRows:
    """Returns rows with ``top_k`` teacher tokens at each position, marked as unrated if the rows have none.

    Raises ValueError if the rollouts have another number of teacher tokens.
    """
    columns = dict(rows.columns)
    for name in ("teacher_top_ids", "teacher_top_logprobs"):
        found = columns.pop(name, None)
        if top_k and found is None:
            empty = torch.from_numpy(COLUMNS[name].filled(1, top_k)).to(rows.tokens.device)
            found = empty.expand(*rows.tokens.shape, top_k)
        if top_k and found is not None:
            columns[name] = found
            if found.shape[-1] != top_k:
                raise ValueError(
                    f"teacher.top_k ({top_k}) must be the number of tokens that the teacher has rated "
                    f"at each position of the rollouts, got {found.shape[-1]}. Set it to that."
                )
    return replace(rows, columns=columns)


def scores_old_policy(config: GRPO) -> bool:
    has_several_steps = config.num_minibatches * config.num_epochs > 1
    return config.old_policy == "step_start" and has_several_steps


@dataclass(frozen=True)
class Scorer:
    """Computes advantages and the logprobs of other policies, before a batch's first optimizer step.

    Pipelines may delay passes that can wait. If a batch has one optimizer step, the current policy is
    also the proximal policy, which then needs no pass of its own. ``teacher`` is None if no rollout
    can have ratings of a teacher. With a ``critic``, advantages are computed from the critic's values.
    """

    config: GRPO
    policy: ModelRunner
    reference: Reference | BaseReference | None
    feed: Feed
    device: torch.device
    is_counted: bool
    teacher: Teacher | None = None
    critic: Critic | None = None

    def score(self, batch: TrainBatch, *, is_critic_alone: bool = False) -> list[Minibatch]:
        """Scores a batch, or a part of one. Collective.

        Also updates the ``moments`` of a critic. If ``is_critic_alone``, that is while only the critic
        learns, skips the passes that only the policy needs.
        """
        top_k = 0 if self.teacher is None else self.teacher.top_k
        minibatches = [with_top_k(rows, top_k).to(self.device) for rows in batch.minibatches]
        needs_ref = not is_critic_alone or self._penalizes_rewards
        ref = [self._job(self.reference if needs_ref else None, rows) for rows in minibatches]
        needs_old = not is_critic_alone and scores_old_policy(self.config)
        old = [self._job(self.policy if needs_old else None, rows) for rows in minibatches]
        targets: Sequence[ValueTargets | None] = [None] * len(minibatches)
        if self.critic is not None:
            minibatches, targets = self._valued(self.critic, minibatches, ref, batch.samples)
        else:
            advantages = self._advantages(batch.samples, minibatches, ref)
            # With top_k its part is a term of the loss, and none of the advantage.
            if self.teacher is None or top_k:
                minibatches = [rows.with_advantages(advantages) for rows in minibatches]
            else:
                minibatches = self._taught(minibatches, batch.samples, advantages, self.teacher)
        whole = zip(minibatches, old, ref, targets, strict=True)
        return [
            Minibatch(rows, of_old, of_ref, of_values) for rows, of_old, of_ref, of_values in whole
        ]

    def _valued(
        self,
        critic: Critic,
        minibatches: list[TrainRows],
        ref: Sequence[ForwardJob | None],
        samples: SampleTable,
    ) -> tuple[list[TrainRows], list[ValueTargets]]:
        """Returns rows with advantages from the critic's values, and the targets that it learns from."""
        # The critic's last stage may be on another rank than the policy's: both need the estimates.
        rewards, found = torch.from_numpy(samples.rewards), []
        for rows, job in zip(minibatches, ref, strict=True):
            values = critic.values(rows).on_all_ranks()
            of_ref = job.on_all_ranks() if self._penalizes_rewards and job is not None else None
            found.append(estimate(rows, values, rewards, of_ref, critic.settings, self.config))
        totals = torch.from_numpy(self._sum(NUM_MOMENTS, (each.moments for each in found)))
        critic.moments.add_(totals)
        mean, whitening = mean_and_variance(totals[:3])[0], None
        if critic.settings.whiten:
            whitening = torch.from_numpy(self._sum(3, (each.moments_about(mean) for each in found)))
        pairs = list(zip(found, minibatches, strict=True))
        valued = [each.advantages_on_tokens(rows, whitening, mean) for each, rows in pairs]
        return valued, [each.targets(rows) for each, rows in pairs]

    @property
    def _penalizes_rewards(self) -> bool:
        return self.config.kl_coef > 0 and self.config.kl_in == "reward"

    def _advantages(
        self,
        samples: SampleTable,
        minibatches: Sequence[TrainRows],
        ref: Sequence[ForwardJob | None],
    ) -> np.ndarray:
        """Returns the advantage of each sample, without what a teacher contributes."""
        config, rewards = self.config, samples.rewards
        if self._penalizes_rewards:
            ref_logprobs = [None if job is None else job.logprobs() for job in ref]
            sums = (
                sample_kl_sums(
                    rows.generator_logprobs,
                    of_ref,
                    rows.loss_mask,
                    rows.sample_ids,
                    num_samples=len(samples),
                    estimator=config.kl_estimator,
                )
                for rows, of_ref in zip(minibatches, ref_logprobs, strict=True)
                if of_ref is not None
            )
            rewards = rewards - config.kl_coef * self._sum(len(samples), sums)
        assert config.advantage != "gae", "the critic's advantages are not those of samples"
        return compute_advantages(
            rewards,
            samples.group_ids,
            kind=config.advantage,
        )

    def _taught(
        self,
        minibatches: Sequence[TrainRows],
        samples: SampleTable,
        advantages: np.ndarray,
        teacher: Teacher,
    ) -> list[TrainRows]:
        num = len(samples)
        of_rows = [_teacher_kl(rows, teacher) for rows in minibatches]
        pairs = list(zip(minibatches, of_rows, strict=True))
        sums = self._sum(num, (sample_sums(kl, rows.sample_ids, num) for rows, kl in pairs))
        baselines = group_baselines(sums, samples.completion_lengths, samples.group_ids)
        advantages = advantages + teacher.coef * baselines
        taught = []
        for rows, kl in pairs:
            of_samples = rows.with_advantages(advantages)
            of_tokens = with_teacher(of_samples.advantages, kl, coef=teacher.coef)
            taught.append(replace(of_samples, advantages=of_tokens))
        return taught

    def _sum(self, size: int, parts: Iterable[torch.Tensor]) -> np.ndarray:
        """Returns the sum, [size] float64, of ``parts`` over all ranks that are counted. Collective."""
        total = torch.zeros(size, dtype=torch.float64)
        if self.is_counted:
            for part in parts:
                total += part.cpu()
        return self.feed.all_reduce_sum(total).numpy()

    def _job(self, runner: ForwardRunner | None, rows: TrainRows) -> ForwardJob | None:
        """Makes a forward pass, and runs it at once unless a pipeline can run it in idle time."""
        if runner is None:
            return None
        job = ForwardJob(runner, rows)
        if not (runner.stages and self.config.pipeline_fill_gaps):
            job.finish()
        return job


def _teacher_kl(rows: TrainRows, teacher: Teacher) -> torch.Tensor:
    generator, ratings = rows.generator_logprobs, rows.columns.get("teacher_logprobs")
    if ratings is None:
        return torch.zeros_like(generator)
    return sampled_reverse_kl(generator, ratings, rows.loss_mask, teacher.max_divergence)
