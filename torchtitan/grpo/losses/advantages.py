# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes advantages from rewards.

Groups are identified by id, not by position. For every kind of advantage, a group of one sample and
a group with equal rewards get advantages of exactly 0, because neither shows which completion was
better. The exception is ``batch_norm`` if all groups have one sample: it then compares the samples of
the whole batch.
"""

from typing import Literal

import numpy as np

# A few units in the last place of float32, and what is left where terms of float64 cancel.
_ROUNDING, _CANCELLED = 2.0**-21, 1e-12

ADVANTAGE_EPS = 1e-4
"""Added to the divisor of an advantage: a standard deviation or, in ``max_rl``, a mean."""


def shape_rewards(
    rewards: np.ndarray,
    completion_lengths: np.ndarray,
    *,
    overlong_buffer: int,
    overlong_penalty: float,
    max_new_tokens: int,
) -> np.ndarray:
    """Subtracts DAPO's soft overlong penalty from rewards.

    The penalty is 0 up to ``max_new_tokens - overlong_buffer`` tokens, grows linearly, and is
    ``overlong_penalty`` at ``max_new_tokens`` (https://arxiv.org/abs/2503.14476, equation 13). A
    buffer of 0 disables it.

    Example: with a buffer of 4 out of 10 tokens and a penalty of 1, a completion of 6 tokens
    loses nothing, one of 8 tokens loses 0.5 and one of 10 tokens loses 1.

    Rewards, lengths (tokens that the model wrote) and the result, float64, are [samples]. Raises
    ValueError if a reward is not finite, or the shapes differ.
    """
    if rewards.shape != completion_lengths.shape:
        raise ValueError(
            f"rewards {rewards.shape} and completion_lengths {completion_lengths.shape} must match."
        )
    require_finite(rewards)
    shaped = rewards.astype(np.float64)
    if overlong_buffer > 0:
        over = completion_lengths - (max_new_tokens - overlong_buffer)
        shaped -= overlong_penalty * np.clip(over / overlong_buffer, 0.0, 1.0)
    return shaped


def require_finite(rewards: np.ndarray) -> None:
    if not np.isfinite(rewards).all():
        raise ValueError(f"Rewards must be finite, got {rewards[~np.isfinite(rewards)][:4]}.")


AdvantageKind = Literal["group_norm", "group_mean", "leave_one_out", "batch_norm", "max_rl"]


def compute_advantages(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    *,
    kind: AdvantageKind,
    eps: float = ADVANTAGE_EPS,
) -> np.ndarray:
    """Returns the advantage of each sample, [samples] float32.

    With ``mean`` and ``std`` of the sample's group, and N samples in the group::

        group_norm           (r - mean) / (std + eps)
        group_mean           r - mean
        leave_one_out        r - mean of the other N - 1  =  N / (N - 1) * (r - mean)
        batch_norm           (r - mean) / (std of all r - mean in the batch + eps)
        max_rl               (r - mean) / (mean + eps)

    They are those of GRPO (https://arxiv.org/abs/2402.03300), Dr.GRPO
    (https://arxiv.org/abs/2503.20783), RLOO (https://arxiv.org/abs/2402.14740), REINFORCE++-baseline
    (https://arxiv.org/abs/2501.03262) and MaxRL (https://arxiv.org/abs/2602.02710). MaxRL needs
    rewards of at least 0, and maximizes the likelihood of success where they are 0 or 1. If every
    group has one sample, ``batch_norm`` subtracts the mean of the batch, as plain REINFORCE++ does.

    The variance of N rewards is the sum of squares divided by N - 1. Raises ValueError if a reward
    is not finite, or below 0 with ``max_rl``, or the shapes differ.
    """
    if rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {rewards.shape} and group_ids {group_ids.shape} must match.")
    require_finite(rewards)
    rewards = rewards.astype(np.float64)
    if kind == "batch_norm" and len(np.unique(group_ids)) == len(group_ids):
        group_ids = np.zeros_like(group_ids)
    return _compared(rewards, group_ids, kind, eps).astype(np.float32)


def _compared(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    kind: AdvantageKind,
    eps: float,
) -> np.ndarray:
    centered, member_of, sizes = _centered(rewards, group_ids)
    match kind:
        case "group_norm":
            squares = np.bincount(member_of, centered**2, len(sizes))
            return centered / (_deviation(squares, sizes)[member_of] + eps)
        case "group_mean":
            return centered
        case "leave_one_out":
            return centered * (sizes / np.maximum(sizes - 1, 1))[member_of]
        case "batch_norm":
            deviation = _deviation((centered**2).sum(), np.array(len(rewards)))
            return centered / (deviation + eps)
        case "max_rl":
            if rewards.min(initial=0.0) < -_ROUNDING * np.abs(rewards).max(initial=0.0):
                raise ValueError(
                    "grpo.advantage = 'max_rl' divides by the mean reward of a group and needs "
                    f"rewards of at least 0, got {rewards.min():g}. Shift the rewards, or choose "
                    "another advantage."
                )
            rewards = np.maximum(rewards, 0.0)  # the rounding of 0
            means = np.bincount(member_of, rewards, len(sizes)) / sizes
            return _centered(rewards, group_ids)[0] / (means[member_of] + eps)


def are_equal(rewards: np.ndarray) -> bool:
    """Returns whether all rewards, [samples], are equal up to rounding errors of float32."""
    return not informative_samples(rewards, np.zeros(len(rewards), np.int64)).any()


def informative_samples(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Returns a mask of the samples in groups with unequal rewards, for DAPO's dynamic sampling."""
    _, member_of = np.unique(group_ids, return_inverse=True)
    num_groups = int(member_of.max(initial=-1)) + 1
    highest, lowest = np.full(num_groups, -np.inf), np.full(num_groups, np.inf)
    np.maximum.at(highest, member_of, rewards)
    np.minimum.at(lowest, member_of, rewards)
    rounding = _ROUNDING * np.maximum(np.abs(highest), np.abs(lowest)) + _CANCELLED
    return (highest - lowest > rounding)[member_of]


def num_equal_groups(rewards: np.ndarray, group_ids: np.ndarray) -> int:
    """Returns the number of groups from which nothing is learned, because all rewards of the group are equal.

    If every group has one sample, returns the number of groups if all rewards of the batch are equal, else 0.
    """
    groups = np.unique(group_ids)
    is_single = len(groups) == len(group_ids)
    compared = np.zeros_like(group_ids) if is_single else group_ids
    informative = informative_samples(rewards, compared)
    return len(groups) - len(np.unique(group_ids[informative]))


def _centered(
    rewards: np.ndarray, group_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns rewards minus their group's mean, each sample's group, and the groups' sizes."""
    _, member_of, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
    means = np.bincount(member_of, rewards, len(sizes)) / sizes
    # The mean of equal numbers may be off in its last bit. Divided by a standard deviation of the
    # same tiny size, the difference would become a large advantage.
    informative = informative_samples(rewards, group_ids)
    return np.where(informative, rewards - means[member_of], 0.0), member_of, sizes


def _deviation(sum_of_squares: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.sqrt(sum_of_squares / np.maximum(count - 1, 1))
