# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[guards]`` table: what happens when a run goes wrong."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least

Action = Literal["skip", "stop", "warn", "off"]


@dataclass
class Guards:
    """``[guards]``: what happens when a run goes wrong. docs/how-to/guards.md explains each.

    Guards judge a gradient before its optimizer step is taken, with the same result on every rank.
    With ``skip`` the optimizer step is not taken: weights and optimizer state stay as they are, and
    the policy version and the learning-rate schedule go on. With ``stop`` the run ends before the
    optimizer step with exit status 3 and, with ``checkpoint.enable``, a checkpoint. With ``warn``
    the step is taken and one line says so, again after twice as many such steps in a row. With
    ``off`` nothing is judged. Except with ``off``, all are counted (``guards/...``).
    """

    nonfinite: Action = "skip"
    """What happens if the loss or the norm of the gradient is NaN or infinite. An optimizer step with
    such a gradient would destroy all weights."""

    grad_norm: Action = "warn"
    """What happens if the norm of the gradient explodes: if it is above ``grad_norm_limit``, or above
    ``training.max_norm`` and above ``grad_norm_factor`` times its running median."""

    grad_norm_limit: Annotated[float, above(0).or_value(0, "off")] = 0.0
    """Norm of the gradient, before clipping, above which ``grad_norm`` acts."""

    grad_norm_factor: Annotated[float, above(1).or_value(0, "off")] = 20.0
    """``grad_norm`` acts if the norm is this many times the median of the latest
    ``grad_norm_window`` norms. A norm that ``training.max_norm`` does not clip is never too
    large."""

    grad_norm_window: Annotated[int, at_least(2)] = 20
    """Number of optimizer steps over which the median is taken. ``grad_norm_factor`` has no effect
    before so many steps of this start of the run."""

    entropy: Action = "warn"
    """What happens if the policy's mean entropy is below ``entropy_floor``: it has stopped to explore.
    Needs the entropy, see ``grpo.log_entropy``."""

    entropy_floor: Annotated[float, at_least(0)] = 1e-3
    """Mean entropy, in nats per trained token, below which ``entropy`` acts."""

    equal_rewards: Action = "warn"
    """What happens if no group has had two different rewards for ``observe.equal_rewards_steps``
    batches in a row, so that rewards teach nothing. Steps are then taken by momentum alone. A replay
    without ``reward.functions`` is not judged: it may have been taught by a teacher alone."""

    mismatch_kl: Action = "warn"
    """What happens if ``mismatch/kl``, the divergence between the trainer's policy and the policy that
    wrote the tokens, is above ``mismatch_kl_limit``."""

    mismatch_kl_limit: Annotated[float, above(0)] = 0.5
    """Divergence, in nats per trained token, above which ``mismatch_kl`` acts."""

    reference_kl: Action = "warn"
    """What happens if ``loss/reference_kl``, the divergence from the reference model, is above
    ``reference_kl_limit``. Has no effect with ``grpo.kl_coef = 0``."""

    reference_kl_limit: Annotated[float, above(0)] = 1.0
    """Divergence, in nats per trained token, above which ``reference_kl`` acts."""

    servers_lost: Literal["stop", "warn", "off"] = "warn"
    """What happens if rank 0 waits for rollouts and no server has been able to take work for
    ``servers_lost_seconds``. No step can be skipped here. Without ``stop`` the run goes on waiting,
    for at most ``rollout.batch_timeout_seconds``, and then ends with an error and without a further
    checkpoint."""

    servers_lost_seconds: Annotated[float, above(0)] = 60.0
    """Time without any server after which ``servers_lost`` acts."""

    max_skipped_steps: Annotated[int, at_least(1)] = 10
    """Number of optimizer steps in a row that may be skipped. With the last of them the run ends, as
    with ``stop``: it would otherwise go on without learning anything."""
