# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Learns from one batch: scores its rows, computes gradients, and steps the optimizer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn as nn

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.feed import Feed, TrainBatch
from torchtitan.grpo.data.step_plan import SampleTable, epoch_order
from torchtitan.grpo.losses.advantages import are_equal as are_all_equal
from torchtitan.grpo.losses.loss_metrics import MetricTotals
from torchtitan.grpo.losses.objective import batch_loss_metrics, metric_reductions
from torchtitan.grpo.training.critic import CRITIC_NORM, Critic, CriticMetrics, build_critic
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.gradient_norm import GradientClipper
from torchtitan.grpo.training.guards import Guards, Verdict
from torchtitan.grpo.training.model_spec import build_reference
from torchtitan.grpo.training.optimizers import Optimizers
from torchtitan.grpo.training.ranks import RankRole
from torchtitan.grpo.training.reference import base_reference
from torchtitan.grpo.training.runner import ForwardJob, ModelRunner, TrainJob
from torchtitan.grpo.training.scoring import Minibatch, MinibatchLoss, Scorer


class GradientParts:
    """Adds the gradients of parts up to the gradient of one optimizer step.

    A part's loss weights are normalized over that part, so the gradient of the step is the mean
    over parts, weighted by mass (`losses/aggregation.py`)::

        gradient = sum over parts of  mass / total mass * gradient of the part

    The total is known only with the last part. Until then a part is scaled by its mass relative to
    the first part's, which keeps gradients in their usual range; :meth:`finish` divides by the
    total. This rank's metrics are added to ``totals``, and a critic's to ``of_critic``.
    """

    def __init__(self, totals: MetricTotals, of_critic: CriticMetrics | None = None) -> None:
        self.totals, self.of_critic = totals, of_critic
        self._parts: list[TrainBatch] = []
        self._unit = self._mass = 0

    @property
    def is_empty(self) -> bool:
        return self._mass == 0

    def scale_of(self, part: TrainBatch) -> float:
        """Registers a part; returns the factor of its loss, 0 if it is left out."""
        self._parts.append(part)
        self._mass += part.mass
        self._unit = self._unit or part.mass
        return part.mass / self._unit if part.mass else 0.0

    def finish(self, parameters: Iterable[torch.Tensor]) -> None:
        """Makes the gradients and sums those of the whole step, in place."""
        if self.is_empty:
            return
        scale = self._unit / self._mass
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self.totals.scale_losses(scale)
        if self.of_critic is not None:
            self.of_critic.totals.scale_losses(scale)

    @property
    def samples(self) -> list[SampleTable]:
        return [part.samples for part in self._parts]

    def whole(self) -> TrainBatch:
        """Returns the last part, with the counts of all parts."""
        return replace(
            self._parts[-1],
            num_tokens=sum(part.num_tokens for part in self._parts),
            num_trained_tokens=sum(part.num_trained_tokens for part in self._parts),
        )


@dataclass(frozen=True)
class StepResult:
    """Result of a batch's optimizer steps on one rank, with ``totals`` of all ranks.

    ``batch`` may be the last part, with the counts of all. ``grad_norms`` are before clipping.
    ``of_critic`` are a critic's metrics. ``spikes`` say where the gradients of spikes are.
    """

    batch: TrainBatch
    totals: MetricTotals
    grad_norms: list[float]
    of_critic: CriticMetrics | None = None
    spikes: list[str] = field(default_factory=list)

    def add(self, totals: MetricTotals, grad_norm: float) -> None:
        """Adds metrics of all ranks and the gradient norm of a step, taken or skipped."""
        self.totals.merge(totals)
        self.grad_norms.append(grad_norm)

    def metrics(self, step_seconds: float) -> dict[str, float]:
        num_updates = max(len(self.grad_norms), 1)
        return (
            batch_loss_metrics(self.totals, num_updates)
            | {
                "grad_norm": sum(self.grad_norms) / num_updates,
                "data/trained_tokens": float(self.batch.num_trained_tokens),
                "time/tokens_per_second": self.batch.num_tokens / step_seconds,
                "time/trained_tokens_per_second": self.batch.num_trained_tokens / step_seconds,
            }
            | ({} if self.of_critic is None else self.of_critic.values())
        )


@dataclass
class Learner:
    """Takes the optimizer steps of a batch on every rank.

    ``before_step`` returns once the optimizer may use its states, and nothing reads the weights
    that it overwrites. A critic, the scorer's, learns from the same minibatches, and its optimizer
    steps when the policy's does.
    """

    scorer: Scorer
    optimizers: Optimizers
    clipper: GradientClipper
    guards: Guards
    enter: Callable[[str], None]
    before_step: Callable[[], None]

    @property
    def critic(self) -> Critic | None:
        return self.scorer.critic

    def learn(self, batch: TrainBatch, step: int) -> StepResult | None:
        """Learns from a whole batch. Returns None if a guard ends the run."""
        learned = StepResult(batch, self._new_totals(), [], self._new_critic_metrics())
        self.scorer.policy.begin_step(step)
        if self._are_rewards_refused(step, [batch.samples]):
            return None
        minibatches = self._score(batch, step, learned.of_critic)
        config = self.scorer.config
        for epoch in range(config.num_epochs):
            for index in epoch_order(config.num_minibatches, epoch):
                # Without trained tokens only momentum and weight decay would move the weights.
                if not batch.minibatch_tokens[index]:
                    continue
                if not self._update(minibatches, index, step, learned):
                    return None
        self.scorer.policy.end_step(self.scorer.feed)
        return learned

    def learn_in_parts(
        self, batch: TrainBatch | None, step: int, next_part: Callable[[], TrainBatch | None]
    ) -> StepResult | None:
        """Takes the one step of a batch in parts; see :class:`GradientParts`.

        ``next_part`` returns None if the run is to end, and so does this, or if a guard ends it.
        """
        gradient = GradientParts(self._new_totals(), self._new_critic_metrics())
        self.scorer.policy.begin_step(step)
        while batch is not None:
            if batch.part.begins_batch:  # again if the rollout process was killed meanwhile
                self._zero_grad()
                gradient = GradientParts(self._new_totals(), self._new_critic_metrics())
            scale = gradient.scale_of(batch)
            if scale:
                (minibatch,) = self._score(batch, step, gradient.of_critic)
                self._add_gradients(minibatch, step, gradient.totals, gradient.of_critic, scale)
            if batch.part.ends_batch:
                return self._finish_parts(gradient, step)
            batch = next_part()
        # A checkpoint that is written now must not depend on an incomplete gradient.
        self._zero_grad()
        return None

    def end_step(self, policy_parts: Sequence[nn.Module]) -> None:
        """Moves the reference and the critic's learning rate on, after the steps of a batch."""
        if self.scorer.reference is not None:
            self.scorer.reference.follow(policy_parts)
        if self.critic is not None:
            self.critic.schedulers.step()

    def _finish_parts(self, gradient: GradientParts, step: int) -> StepResult | None:
        of_critic = [] if self.critic is None else self.critic.clipper.parameters()
        gradient.finish([*self.clipper.parameters(), *of_critic])
        metrics = gradient.of_critic
        if metrics is not None:  # those of the losses are added with the step
            metrics = CriticMetrics(metrics.learning_rate, moments=metrics.moments)
        learned = StepResult(gradient.whole(), self._new_totals(), [], metrics)
        if self._are_rewards_refused(step, gradient.samples):
            return None
        totals, of_critic = gradient.totals, gradient.of_critic
        if not gradient.is_empty and not self._apply_gradient(step, learned, totals, of_critic):
            return None
        self.scorer.policy.end_step(self.scorer.feed)
        return learned

    def _new_totals(self) -> MetricTotals:
        return MetricTotals(metric_reductions(self.scorer.config, self.scorer.teacher))

    def _new_critic_metrics(self) -> CriticMetrics | None:
        return None if self.critic is None else self.critic.new_metrics()

    def _is_critic_alone(self, step: int) -> bool:
        return self.critic is not None and self.critic.is_alone(step)

    def _zero_grad(self) -> None:
        self.optimizers.zero_grad()
        if self.critic is not None:
            self.critic.optimizers.zero_grad()

    def _score(
        self, batch: TrainBatch, step: int, of_critic: CriticMetrics | None
    ) -> list[Minibatch]:
        self.enter("forward and backward")
        return self.scorer.score(batch, of_critic, is_critic_alone=self._is_critic_alone(step))

    def _are_rewards_refused(self, step: int, tables: Sequence[SampleTable]) -> bool:
        are_equal = all(samples.are_rewards_equal for samples in tables)
        if self.critic is not None:  # which compares with its estimate, and not within a group
            are_equal = are_all_equal(np.concatenate([t.rewards for t in tables]))
        return self.guards.judge_rewards(step, are_equal=are_equal) is Verdict.STOP

    def _update(
        self, minibatches: list[Minibatch], index: int, step: int, learned: StepResult
    ) -> bool:
        old = [minibatch.old for minibatch in minibatches if minibatch.old is not None]
        ref = [minibatch.ref for minibatch in minibatches if minibatch.ref is not None]
        totals, of_critic = self._new_totals(), self._new_critic_metrics()
        self._zero_grad()
        waiting = [*old, *ref]
        self._add_gradients(minibatches[index], step, totals, of_critic, waiting=waiting)
        for job in old:
            job.finish()  # with the current weights
        return self._apply_gradient(step, learned, totals, of_critic)

    def _add_gradients(
        self,
        minibatch: Minibatch,
        step: int,
        totals: MetricTotals,
        of_critic: CriticMetrics | None,
        scale: float = 1.0,
        waiting: Sequence[ForwardJob] = (),
    ) -> None:
        """Adds the gradients of the policy and of a critic, or of a critic that learns alone."""
        scorer, rows = self.scorer, minibatch.rows
        value_loss, beside = None, None
        if self.critic is not None and minibatch.values is not None:
            value_loss = self.critic.loss(minibatch.values, scale)
            beside = TrainJob(self.critic.runner, value_loss)
        if beside is not None and self._is_critic_alone(step):
            beside.runner.forward_backward(rows, beside.loss)
        else:
            loss = MinibatchLoss(minibatch.scored(), scorer.config, scale, scorer.teacher)
            scorer.policy.forward_backward(rows, loss, waiting, beside)
            if scorer.is_counted:
                loss.add_metrics(totals)
        if value_loss is not None and of_critic is not None:
            value_loss.add_metrics(of_critic.totals)

    def _apply_gradient(
        self,
        step: int,
        learned: StepResult,
        totals: MetricTotals,
        of_critic: CriticMetrics | None = None,
    ) -> bool:
        """Clips and steps, unless a guard refuses; returns False if it ends the run."""
        self.enter("optimizer step")
        is_alone = self._is_critic_alone(step)
        grad_norm = None if is_alone else self.clipper.clip()
        critic_norm = None if self.critic is None else self.critic.clipper.clip()
        self.before_step()
        # The one place of a step at which the host waits for the gradient.
        norm = self.scorer.feed.all_reduce_metrics(totals, grad_norm)
        critic = self._reduce_critic(of_critic, critic_norm, learned)
        metrics = totals.values(1) | critic
        spike = ""
        if not is_alone and self.guards.is_spike(norm):
            name, share = self.clipper.largest(norm, self.scorer.feed.group)
            spike = f"grad_norm {norm:.4g}, {share:.0%} of its square in {name}"
            learned.spikes.append(spike)
        verdict = self.guards.judge(step, None if is_alone else norm, metrics, spike)
        if verdict is Verdict.TAKE:
            if not is_alone:
                self._forget_idle_states(step, learned)
                self.optimizers.step()
            if self.critic is not None:
                self.critic.optimizers.step()
        learned.add(totals, norm)
        return verdict is not Verdict.STOP

    def _forget_idle_states(self, step: int, learned: StepResult) -> None:
        """Lets the policy's first step after the critic's warmup begin with new optimizer states.

        A checkpoint in the warmup has made states that count a step of the policy, which took none.
        """
        warmup_steps = 0 if self.critic is None else self.critic.settings.warmup_steps
        if warmup_steps and step == warmup_steps + 1 and not learned.grad_norms:
            for optimizer in self.optimizers:
                optimizer.state.clear()

    def _reduce_critic(
        self, metrics: CriticMetrics | None, grad_norm: torch.Tensor | None, learned: StepResult
    ) -> dict[str, float]:
        """Combines a critic's metrics of an optimizer step over all ranks, for guards and logs."""
        if metrics is None or learned.of_critic is None:
            return {}
        norm = self.scorer.feed.all_reduce_metrics(metrics.totals, grad_norm)
        learned.of_critic.add(metrics.totals, norm)
        return metrics.totals.values(1) | {CRITIC_NORM: norm}


def build_learner(
    trainer: Trainer,
    runner: ModelRunner,
    feed: Feed,
    role: RankRole,
    guards: Guards,
    enter: Callable[[str], None],
    before_step: Callable[[], None],
) -> Learner:
    """Returns a trainer's learner, whose reference model and critic join the checkpoints."""
    config: JobConfig = trainer.job_config  # pyright: ignore[reportAssignmentType]
    reference = None
    if config.grpo.kl_coef > 0:
        reference = (
            base_reference(runner, trainer.model_parts, config)
            if config.lora.rank
            else build_reference(trainer)
        )
        trainer.checkpointer.states.update(reference.checkpoint_state())
    critic = None
    if config.has_critic:
        critic = build_critic(trainer)
        trainer.checkpointer.states.update(critic.checkpoint_state())
    scorer = Scorer(
        config=config.grpo,
        policy=runner,
        reference=reference,
        feed=feed,
        device=trainer.device,
        is_counted=role.is_counted,
        teacher=config.teacher if config.may_be_taught else None,
        critic=critic,
    )
    dims, max_norm = trainer.parallel_dims, config.training.max_norm
    clipper = GradientClipper(trainer.model_parts, dims, max_norm)
    return Learner(scorer, trainer.optimizers, clipper, guards, enter, before_step)
