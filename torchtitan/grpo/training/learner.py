# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Learns from one batch: scores its rows, computes gradients, and steps the optimizers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.feed import Feed, TrainBatch
from torchtitan.grpo.data.step_plan import SampleTable, epoch_order
from torchtitan.grpo.losses.advantages import are_equal as are_all_equal
from torchtitan.grpo.losses.objective import metric_reductions
from torchtitan.grpo.pipeline.pass_marks import PassMarks, PassTimes, compared
from torchtitan.grpo.training.critic import Critic, build_critic
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.gradient_norm import GradientClipper
from torchtitan.grpo.training.guards import Guards, Verdict
from torchtitan.grpo.training.model_spec import build_reference
from torchtitan.grpo.training.ranks import RankRole
from torchtitan.grpo.training.reference import base_reference
from torchtitan.grpo.training.runner import ForwardJob, ModelRunner, TrainJob
from torchtitan.grpo.training.scoring import MinibatchLoss, Scorer
from torchtitan.grpo.training.trainee import LoggedTokens, Minibatch, Trainee


class GradientParts:
    """Computes the gradient of one optimizer step from the gradients of a batch's parts.

    A part's loss weights are normalized over that part, so the gradient of the step is the mean
    over parts, weighted by their mass (see `losses/advantages.py`)::

        gradient = sum over parts of  mass / total mass * gradient of the part

    The total is known only with the last part. Each part is therefore scaled by its mass relative to the
    first part's, which keeps gradients in their usual range. In the end, ``last_scale`` corrects the sum.
    """

    def __init__(self) -> None:
        self._parts: list[TrainBatch] = []
        self._unit = self._mass = 0

    @property
    def is_empty(self) -> bool:
        return self._mass == 0

    def scale_of(self, part: TrainBatch) -> float:
        """Registers a part, and returns the factor by which to scale its loss: 0 if its mass is 0."""
        self._parts.append(part)
        self._mass += part.mass
        self._unit = self._unit or part.mass
        return part.mass / self._unit if part.mass else 0.0

    @property
    def last_scale(self) -> float:
        """Factor that turns the summed gradient and losses into those of the whole step."""
        return self._unit / self._mass

    @property
    def samples(self) -> list[SampleTable]:
        return [part.samples for part in self._parts]

    def whole(self) -> TrainBatch:
        """Returns the last part, with the token counts of all parts together."""
        return replace(
            self._parts[-1],
            num_tokens=sum(part.num_tokens for part in self._parts),
            num_trained_tokens=sum(part.num_trained_tokens for part in self._parts),
        )


@dataclass(frozen=True)
class StepResult:
    """Result of a batch's optimizer steps, with metrics of all ranks.

    If the batch came in parts, ``batch`` is the last one, with the token counts of all. ``spikes`` has a
    text for each spike of the gradient norm, which names the parameter with the largest gradient.
    ``of_tokens`` [2, tokens] are the values that all ranks kept of logged tokens; None without any.
    """

    batch: TrainBatch
    of_trainees: dict[str, float]
    spikes: list[str]
    of_tokens: np.ndarray | None = None

    def metrics(self, step_seconds: float) -> dict[str, float]:
        return self.of_trainees | {
            "data/trained_tokens": float(self.batch.num_trained_tokens),
            "time/tokens_per_second": self.batch.num_tokens / step_seconds,
            "time/trained_tokens_per_second": self.batch.num_trained_tokens / step_seconds,
        }


@dataclass
class Policy(Trainee):
    """The trained policy, which learns from the advantages that the ``scorer`` computes."""

    scorer: Scorer
    first_step: int = 1

    def loss(self, minibatch: Minibatch, scale: float) -> MinibatchLoss:
        return MinibatchLoss(minibatch.scored(), self.scorer.config, scale, self.scorer.teacher)

    def metrics(self) -> dict[str, float]:
        found = super().metrics() | {"lr": self.learning_rate}
        if found["policy/entropy"] == 0:  # not computed: that of a real distribution is above 0
            del found["policy/entropy"]
        return found


@dataclass
class Learner:
    """Takes the optimizer steps of a batch on every rank.

    ``before_step`` waits until optimizer states are usable and nothing else reads the weights, which the
    optimizers then overwrite. ``trainees`` are the policy and then the scorer's critic, if there is one.
    The critic learns from the same minibatches and steps at the same time.
    """

    scorer: Scorer
    trainees: Sequence[Trainee]
    guards: Guards
    enter: Callable[[str], None]
    before_step: Callable[[], None]
    marks: PassMarks = field(default_factory=lambda: PassMarks(torch.device("cpu")))
    _times: PassTimes = field(default_factory=PassTimes)
    _spikes: list[str] = field(default_factory=list)
    _logged: list[tuple[TrainBatch, list[LoggedTokens]]] = field(default_factory=list)

    @property
    def policy(self) -> Trainee:
        return self.trainees[0]

    @property
    def critic(self) -> Critic | None:
        return self.scorer.critic

    def learn(self, batch: TrainBatch, step: int) -> StepResult | None:
        """Learns from a whole batch. Returns None if a guard ends the run."""
        self._begin_batch()
        self.policy.runner.begin_step(step)
        if self._are_rewards_refused(step, [batch.samples]):
            return None
        minibatches = self._score(batch, step)
        config = self.scorer.config
        for epoch in range(config.num_epochs):
            for index in epoch_order(config.num_minibatches, epoch):
                # Without trained tokens only momentum and weight decay would move the weights.
                if not batch.minibatch_tokens[index]:
                    continue
                if not self._update(minibatches, index, step):
                    return None
            # Only the first epoch begins with the policy before the update.
            minibatches = [replace(minibatch, logged=None) for minibatch in minibatches]
        return self._end_batch(batch)

    def learn_in_parts(
        self, batch: TrainBatch | None, step: int, next_part: Callable[[], TrainBatch | None]
    ) -> StepResult | None:
        """Takes the one step of a batch in parts; see :class:`GradientParts`.

        Returns None if a guard ends the run, or if ``next_part`` returns None because the run ends.
        """
        gradient = GradientParts()
        self.policy.runner.begin_step(step)
        while batch is not None:
            if batch.part.begins_batch:  # again if the rollout process was killed meanwhile
                self._begin_batch()
                gradient = GradientParts()
            scale = gradient.scale_of(batch)
            if scale:
                (minibatch,) = self._score(batch, step)
                self._add_gradients(minibatch, step, scale)
            if batch.part.ends_batch:
                return self._finish_parts(gradient, step)
            batch = next_part()
        # A checkpoint that is written now must not depend on an incomplete gradient.
        for trainee in self.trainees:
            trainee.begin_update()
        return None

    def end_step(self) -> None:
        """Updates the reference and the learning rates after the steps of a batch."""
        if self.scorer.reference is not None:
            self.scorer.reference.follow(self.policy.parts)
        for trainee in self.trainees:
            trainee.schedulers.step()

    def take_pass_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the seconds of each part of the passes since the last call, and metrics that compare ranks."""
        times, self._times = self._times, PassTimes()
        own = self.scorer.feed.take_own_seconds()
        return times.divided(own), compared(own)

    def measure(self) -> float:
        """Reads the times of the passes, and returns the seconds of this rank's own work."""
        times = self.marks.take()  # the host has just waited for the device
        self._times.add(times)
        return times.own

    def _begin_batch(self) -> None:
        self._spikes, self._logged = [], []
        self.marks.forget()
        for trainee in self.trainees:
            trainee.begin_batch()

    def _end_batch(self, batch: TrainBatch) -> StepResult:
        self.policy.runner.end_step(self.scorer.feed)
        metrics = (trainee.metrics() for trainee in self.trainees)
        of_trainees = {k: v for found in metrics for k, v in found.items()}
        return StepResult(batch, of_trainees, self._spikes, self._of_tokens())

    def _of_tokens(self) -> np.ndarray | None:
        is_counted, parts = self.scorer.is_counted, []
        for part, logged in self._logged:
            own = torch.cat([one.values() for one in logged], dim=1) if is_counted else None
            parts.append((part, own))
        return self.scorer.feed.join_logged(parts)

    def _finish_parts(self, gradient: GradientParts, step: int) -> StepResult | None:
        if not gradient.is_empty:
            for trainee in self.trainees:
                trainee.scale_gradient(gradient.last_scale)
        if self._are_rewards_refused(step, gradient.samples):
            return None
        if not gradient.is_empty and not self._apply_gradient(step):
            return None
        return self._end_batch(gradient.whole())

    def _score(self, batch: TrainBatch, step: int) -> list[Minibatch]:
        self.enter("forward and backward")
        minibatches = self.scorer.score(batch, is_critic_alone=not self.policy.learns(step))
        if any(batch.num_logged):
            of_samples = torch.from_numpy(batch.samples.are_logged(batch.logged_groups))
            masks = [rows.loss_mask & of_samples[rows.sample_ids] for rows in batch.minibatches]
            self._logged.append((batch, [LoggedTokens(mask) for mask in masks]))
            pairs = zip(minibatches, self._logged[-1][1], strict=True)
            minibatches = [replace(minibatch, logged=logged) for minibatch, logged in pairs]
        return minibatches

    def _are_rewards_refused(self, step: int, tables: Sequence[SampleTable]) -> bool:
        are_equal = all(samples.are_rewards_equal for samples in tables)
        if self.critic is not None:  # which compares with its estimate, and not within a group
            are_equal = are_all_equal(np.concatenate([t.rewards for t in tables]))
        return self.guards.judge_rewards(step, are_equal=are_equal) is Verdict.STOP

    def _update(self, minibatches: list[Minibatch], index: int, step: int) -> bool:
        old = [minibatch.old for minibatch in minibatches if minibatch.old is not None]
        ref = [minibatch.ref for minibatch in minibatches if minibatch.ref is not None]
        for trainee in self.trainees:
            trainee.begin_update()
        self._add_gradients(minibatches[index], step, waiting=[*old, *ref])
        for job in old:
            job.finish()  # with the current weights
        return self._apply_gradient(step)

    def _add_gradients(
        self,
        minibatch: Minibatch,
        step: int,
        scale: float = 1.0,
        waiting: Sequence[ForwardJob] = (),
    ) -> None:
        """Adds the gradients of the trainees that learn in this step, if possible in one pass."""
        self.enter("forward and backward")
        learning = [trainee for trainee in self.trainees if trainee.learns(step)]
        losses = [trainee.loss(minibatch, scale) for trainee in learning]
        first, *others = (TrainJob(t.runner, x) for t, x in zip(learning, losses, strict=True))
        beside = others[0] if others else None
        first.runner.forward_backward(minibatch.rows, first.loss, waiting, beside)
        for trainee, loss in zip(learning, losses, strict=True):
            if trainee.is_counted:
                loss.add_metrics(trainee.of_update)

    def _apply_gradient(self, step: int) -> bool:
        """Clips the gradients, and steps unless a guard refuses. Returns False if a guard ends the run."""
        self.marks.mark("optimizer")
        norms = [t.clipper.clip() if t.learns(step) else None for t in self.trainees]
        self.marks.mark("")
        self.before_step()
        # The one place of a step at which the host waits for the gradient.
        metrics, spike = dict[str, float](), ""
        for trainee, grad_norm in zip(self.trainees, norms, strict=True):
            metrics |= trainee.finish_update(self.scorer.feed, grad_norm)
        self.enter("optimizer step")
        norm = metrics.pop("grad_norm", None)
        if norm is not None and self.guards.is_spike(norm):
            name, share = self.policy.clipper.largest(norm, self.scorer.feed.group)
            spike = f"grad_norm {norm:.4g}, {share:.0%} of its square in {name}"
            self._spikes.append(spike)
        verdict = self.guards.judge(step, norm, metrics, spike)
        if verdict is Verdict.TAKE:
            for trainee in self.trainees:
                trainee.take_step(step)
        return verdict is not Verdict.STOP


def build_learner(
    trainer: Trainer,
    runner: ModelRunner,
    feed: Feed,
    role: RankRole,
    guards: Guards,
    enter: Callable[[str], None],
    before_step: Callable[[], None],
) -> Learner:
    """Returns a trainer's learner. Checkpoints will include its reference model and critic."""
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
    policy = Policy(
        runner, trainer.model_parts, trainer.optimizers, trainer.lr_schedulers,
        GradientClipper(trainer.model_parts, trainer.parallel_dims, config.training.max_norm),
        metric_reductions(config.grpo, scorer.teacher), role.is_counted, scorer,
        first_step=1 if critic is None else config.critic.warmup_steps + 1,
    )  # fmt: skip
    trainees = [policy] if critic is None else [policy, critic]
    marks = PassMarks(trainer.device)
    for trainee in trainees:
        trainee.runner.mark_in(marks)
    learner = Learner(scorer, trainees, guards, enter, before_step, marks)
    feed.own_seconds = learner.measure
    return learner
