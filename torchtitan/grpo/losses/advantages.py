# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Advantages from rewards."""

import numpy as np


def group_normalised_advantages(
    rewards: np.ndarray, group_ids: np.ndarray, eps: float = 1e-4
) -> np.ndarray:
    """Reward less its group's mean, over its group's standard deviation.

    GRPO (https://arxiv.org/abs/2402.03300), with the sample standard deviation (N - 1).
    Groups are told apart by id, not by position. A group of one sample, or with equal
    rewards, gets 0: it says nothing about which completion was better.

    Args:
        rewards: [samples] float.
        group_ids: [samples] int.
        eps: Added to the standard deviation.

    Returns:
        [samples] float32.

    Raises:
        ValueError: A reward is not finite, or the shapes differ.
    """
    if rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {rewards.shape} and group_ids {group_ids.shape} must match.")
    if not np.isfinite(rewards).all():
        raise ValueError(f"Rewards must be finite, got {rewards[~np.isfinite(rewards)][:4]}.")
    rewards = rewards.astype(np.float64)
    _, member_of, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
    centred = rewards - (np.bincount(member_of, rewards) / sizes)[member_of]
    variance = np.bincount(member_of, centred**2) / np.maximum(sizes - 1, 1)
    return (centred / (np.sqrt(variance)[member_of] + eps)).astype(np.float32)
