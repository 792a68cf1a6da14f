# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Shapes rewards before advantages: a factor for each sign, and a penalty for length."""

import numpy as np


def shape_rewards(
    rewards: np.ndarray,
    completion_lengths: np.ndarray,
    *,
    positive_scale: float,
    negative_scale: float,
    overlong_buffer: int,
    overlong_penalty: float,
    max_new_tokens: int,
) -> np.ndarray:
    """Scales rewards by a factor for their sign and subtracts DAPO's soft overlong penalty.

    The penalty is 0 up to ``max_new_tokens - overlong_buffer`` tokens, grows linearly, and
    is ``overlong_penalty`` at ``max_new_tokens`` (https://arxiv.org/abs/2503.14476,
    equation 13). The factors do not apply to the penalty.

    Example: with a buffer of 4 out of 10 tokens and a penalty of 1, a completion of 6 tokens
    loses nothing, one of 8 tokens loses 0.5 and one of 10 tokens loses 1.

    Args:
        rewards: [samples] float, finite.
        completion_lengths: [samples] int, number of tokens that the model wrote.
        positive_scale: Factor of rewards above 0.
        negative_scale: Factor of rewards below 0.
        overlong_buffer: Number of tokens over which the penalty grows; 0 disables the penalty.
        overlong_penalty: Penalty of a completion of full length.
        max_new_tokens: Full length of a completion, in tokens.

    Returns:
        The shaped rewards, [samples] float64.

    Raises:
        ValueError: If a reward is not finite, or the shapes differ.
    """
    if rewards.shape != completion_lengths.shape:
        raise ValueError(
            f"rewards {rewards.shape} and completion_lengths {completion_lengths.shape} must match."
        )
    require_finite(rewards)
    rewards = rewards.astype(np.float64)
    shaped = np.where(rewards > 0, rewards * positive_scale, rewards * negative_scale)
    if overlong_buffer > 0:
        over = completion_lengths - (max_new_tokens - overlong_buffer)
        shaped -= overlong_penalty * np.clip(over / overlong_buffer, 0.0, 1.0)
    return shaped


def require_finite(rewards: np.ndarray) -> None:
    """Raises ValueError, with the first ones, if some rewards are not finite."""
    if not np.isfinite(rewards).all():
        raise ValueError(f"Rewards must be finite, got {rewards[~np.isfinite(rewards)][:4]}.")
