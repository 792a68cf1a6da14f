# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The critic: a second trained model, laid out like the policy, that estimates the reward to come.

    rows -> values (before the first update) -> advantages and targets -> value loss -> its own step

`losses/gae.py` has the formulas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.config import Critic as Settings
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.losses.gae import (
    Decisions,
    estimate_advantages,
    explained_variance,
    find_decisions,
    mean_and_variance,
    moments,
    token_rewards,
    value_loss,
    whitened,
)
from torchtitan.grpo.losses.kl import kl_estimate
from torchtitan.grpo.losses.loss_metrics import (
    Metric,
    Reduction,
    loss_metric,
    mean_metric,
)
from torchtitan.grpo.models.hf_names import ValueAdapter
from torchtitan.grpo.models.hf_weights import load_hf_weights
from torchtitan.grpo.models.packed_model import PackedModel
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.gradient_norm import GradientClipper
from torchtitan.grpo.training.lr_schedule import build_lr_schedulers
from torchtitan.grpo.training.model_spec import (
    VALUE_HEAD,
    build_beside,
    critic_args,
    critic_settings,
    whole_model_runner,
)
from torchtitan.grpo.training.optimizers import build_optimizers
from torchtitan.grpo.training.ranks import rank_role
from torchtitan.grpo.training.reference import PartsState
from torchtitan.grpo.training.runner import ForwardJob
from torchtitan.grpo.training.trainee import Minibatch, Trainee, TraineeLoss, ValueTargets

_RECOMPILE_LIMIT = 32
NUM_MOMENTS = 9
"""Length of :attr:`Estimates.moments`."""


@dataclass(frozen=True)
class Estimates:
    """Advantages and targets of some rows' decisions (see `gae.py`), [decisions] float64.

    ``moments``, [9] float64, are the :func:`moments` of the tokens' advantages, of the returns, and of
    the returns minus the values. Those of a batch are the sum of those of its parts.
    """

    decisions: Decisions
    advantages: torch.Tensor
    values: torch.Tensor
    returns: torch.Tensor

    @property
    def moments(self) -> torch.Tensor:
        errors = self.returns - self.values
        return torch.cat([self.moments_about(0.0), moments(self.returns), moments(errors)])

    def moments_about(self, mean: float) -> torch.Tensor:
        """Returns the moments of the tokens' advantages about ``mean``, as of a batch, [3] float64."""
        return moments(self.advantages[self.decisions.of_token], mean)

    def advantages_on_tokens(
        self, rows: TrainRows, totals: torch.Tensor | None, mean: float = 0.0
    ) -> TrainRows:
        """Returns the rows with their advantages.

        With ``totals``, a batch's sum of :meth:`moments_about`, the advantages are whitened."""
        advantages = self.advantages
        if totals is not None:
            advantages = whitened(advantages, totals, mean)
        on_tokens = self.decisions.on_tokens(advantages, rows.loss_mask.shape)
        return replace(rows, advantages=on_tokens)

    def targets(self, rows: TrainRows) -> ValueTargets:
        shape, decisions = rows.loss_mask.shape, self.decisions
        return ValueTargets(
            old_values=decisions.on_begins(self.values, shape),
            returns=decisions.on_begins(self.returns, shape),
            weights=decisions.on_begins(decisions.sums(rows.loss_weights), shape),
        )


def estimate(
    rows: TrainRows,
    values: torch.Tensor,
    rewards: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    critic: Settings,
    grpo: GRPO,
) -> Estimates:
    """Computes rows' advantages and value targets from values [rows, seq] and rewards [samples].

    With ``ref_logprobs`` [rows, seq], a KL penalty is subtracted from the reward of each token.
    """
    decisions = find_decisions(rows.loss_mask, rows.sequence_ids, critic.level)
    of_decisions = token_rewards(rewards.to(values.device), rows.sample_ids, decisions)
    if ref_logprobs is not None:
        kl = kl_estimate(rows.generator_logprobs, ref_logprobs, grpo.kl_estimator)
        of_decisions = of_decisions - grpo.kl_coef * decisions.sums(kl)
    at_begins = decisions.at_begins(values)

    def advantages(lam: float) -> torch.Tensor:
        return estimate_advantages(of_decisions, at_begins, decisions, gamma=critic.gamma, lam=lam)

    # Discounted rewards to come, which do not depend on the critic's own values.
    returns = advantages(1.0) + at_begins
    return Estimates(decisions, advantages(critic.gae_lambda), at_begins, returns)


CRITIC_REDUCTIONS: dict[str, Reduction] = {"critic/loss": "loss", "critic/clip_fraction": "mean"}


class CriticLoss(TraineeLoss):
    def __init__(self, targets: ValueTargets, clip: float, scale: float = 1.0) -> None:
        super().__init__(scale)
        self.targets, self.clip = targets, clip

    def compute(
        self, output: torch.Tensor, which: slice
    ) -> tuple[torch.Tensor, Mapping[str, Metric]]:
        """Returns the value loss and its metrics. ``output`` holds the values [rows, seq, 1]."""
        targets, weights = self.targets, self.targets.weights[which]
        loss, is_clipped = value_loss(
            output[..., 0], targets.old_values[which], targets.returns[which], weights, self.clip
        )
        return loss, {
            "critic/loss": loss_metric(loss),
            "critic/clip_fraction": mean_metric(is_clipped.sum(), (weights > 0).sum()),
        }


@dataclass
class Critic(Trainee):
    """The critic's model, optimizer and learning-rate schedule. Checkpoints hold all three."""

    settings: Settings

    norm_name = "critic/grad_norm"

    def begin_batch(self) -> None:
        super().begin_batch()
        # Of the batch's values, of all ranks.
        self.moments = torch.zeros(NUM_MOMENTS, dtype=torch.float64)

    def values(self, rows: TrainRows) -> ForwardJob:
        return ForwardJob(self.runner, rows)

    def loss(self, minibatch: Minibatch, scale: float) -> CriticLoss:
        assert minibatch.values is not None, "the scorer has asked the critic"
        return CriticLoss(minibatch.values, self.settings.value_clip, scale)

    def metrics(self) -> dict[str, float]:
        returns, errors = self.moments[3:6], self.moments[6:9]
        mean_return = mean_and_variance(returns)[0]
        return super().metrics() | {
            "critic/explained_variance": explained_variance(errors, returns),
            "critic/mean_return": mean_return,
            "critic/mean_value": mean_return - mean_and_variance(errors)[0],
            "critic/lr": self.learning_rate,
        }

    def checkpoint_state(self) -> dict[str, Stateful]:
        return {
            "critic": PartsState(self.parts),
            "critic_optimizer": self.optimizers,
            "critic_lr_scheduler": self.schedulers,
        }


def build_critic(trainer: Trainer) -> Critic:
    """Builds the critic in the policy's layout, from ``critic.path`` if that is set.

    Raises ModelError if the directory holds unreadable weights.
    """
    config: Any = trainer.job_config
    dims, settings = trainer.parallel_dims, config.critic
    args = critic_args(trainer.model_args)
    scoring = critic_settings(config, args)
    if config.compile.enable:
        # Both models run the same code, whose compiled variants Dynamo counts together.
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, _RECOMPILE_LIMIT)
    stages, parts = build_beside(trainer, lambda: PackedModel(args, scoring), is_second=True)
    _load(parts, ValueAdapter(args, settings.path or config.model.hf_assets_path), config)
    if dims.pp_enabled:
        from torchtitan.grpo.pipeline.build import build_schedule
        from torchtitan.grpo.training.stage_runner import PipelineRunner, StageLoss

        loss = StageLoss()
        runner = PipelineRunner(build_schedule(config, stages, loss), loss, config)
    else:
        runner = whole_model_runner(parts[0], config)
    optimizer = replace(config.optimizer, lr=settings.lr, muon_lr=0.0)
    optimizers = build_optimizers(parts, optimizer)
    schedulers = build_lr_schedulers(
        optimizers, config.lr_scheduler, config.training.steps,
        num_steps=trainer.train_spec.schedule_steps,
    )  # fmt: skip
    clipper = GradientClipper(parts, dims, config.training.max_norm)
    is_counted = rank_role(dims, has_output=runner.has_output).is_counted
    return Critic(
        runner, parts, optimizers, schedulers, clipper, CRITIC_REDUCTIONS, is_counted, settings
    )


def _load(parts: Sequence[nn.Module], adapter: ValueAdapter, config: Any) -> None:
    key = "model.hf_assets_path" if config.critic.path is None else "critic.path"
    for part in parts:
        part.train()
        if part.output is not None:
            nn.init.zeros_(part.output.weight)  # pyright: ignore
    path = adapter.hf_assets_path
    assert path is not None
    load_hf_weights(list(parts), adapter, path, setting=key, new=VALUE_HEAD)
