# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rewards before advantages: scaled by sign, and less for running into the length limit."""

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
    """Rewards scaled by their sign, then DAPO's soft overlong penalty taken off.

    The penalty is 0 up to ``max_new_tokens - overlong_buffer`` tokens, grows linearly, and
    is ``overlong_penalty`` at ``max_new_tokens`` (https://arxiv.org/abs/2503.14476,
    equation 13). It is not scaled: the factors weigh what was scored, not the length.

    Example: buffer 4 of 10 tokens, penalty 1: 6 tokens lose nothing, 8 lose 0.5, 10 lose 1.

    Args:
        rewards: [samples] float, finite.
        completion_lengths: [samples] int, tokens that the model wrote of each sample.
        positive_scale: Factor of rewards above 0.
        negative_scale: Factor of rewards below 0.
        overlong_buffer: Tokens over which the penalty grows; 0 takes nothing off.
        overlong_penalty: Taken off a completion of full length.
        max_new_tokens: The full length.

    Returns:
        [samples] float64.

    Raises:
        ValueError: A reward is not finite, or the shapes differ.
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
    """Raises ValueError with the first rewards that are not finite."""
    if not np.isfinite(rewards).all():
        raise ValueError(f"Rewards must be finite, got {rewards[~np.isfinite(rewards)][:4]}.")
