# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Advantages from rewards.

Groups are told apart by id, not by position. Two rules hold for every kind: a group of
one sample, and a group whose rewards are all equal, gets exactly 0, since neither says
which completion was better. (``batch_norm`` with nothing but one-sample groups compares
the whole batch instead.)
"""

from typing import Literal

import numpy as np

from torchtitan.grpo.losses.reward_shaping import require_finite

AdvantageKind = Literal["group_norm", "group_mean", "leave_one_out", "batch_norm"]


def compute_advantages(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    completion_lengths: np.ndarray,
    *,
    kind: AdvantageKind,
    std: Literal["sample", "population"],
    eps: float,
    length_power: float,
) -> np.ndarray:
    """What each sample's reward is worth beside the others.

    With the mean and standard deviation of a sample's group, and N samples in it::

        group_norm      (r - mean) / (std + eps)
        group_mean      r - mean
        leave_one_out   r - mean of the other N - 1  =  N / (N - 1) * (r - mean)
        batch_norm      (r - mean) / (std of all r - mean in the batch + eps)

    GRPO (https://arxiv.org/abs/2402.03300), Dr.GRPO (https://arxiv.org/abs/2503.20783),
    RLOO (https://arxiv.org/abs/2402.14740) and REINFORCE++-baseline
    (https://arxiv.org/abs/2501.03262). Where every group has one sample, ``batch_norm``
    takes the batch's mean: plain REINFORCE++.

    Args:
        rewards: [samples] float, finite.
        group_ids: [samples] int.
        completion_lengths: [samples] int, trained tokens of each sample.
        kind: ``grpo.advantage``.
        std: Divisor of the variance: N - 1, or N.
        eps: Added to the standard deviation.
        length_power: The result is multiplied by ``(mean length / length) ** power``; the
            mean is over samples with a token, and a sample without one keeps its value.

    Returns:
        [samples] float32.

    Raises:
        ValueError: A reward is not finite, the shapes differ, or the kind is not known.
    """
    if not rewards.shape == group_ids.shape == completion_lengths.shape:
        raise ValueError(
            f"rewards {rewards.shape}, group_ids {group_ids.shape} and completion_lengths "
            f"{completion_lengths.shape} must match."
        )
    require_finite(rewards)
    rewards = rewards.astype(np.float64)
    if kind == "batch_norm" and len(np.unique(group_ids)) == len(group_ids):
        group_ids = np.zeros_like(group_ids)
    centred, member_of, sizes = _centred(rewards, group_ids)
    match kind:
        case "group_norm":
            sums_of_squares = np.bincount(member_of, centred**2, len(sizes))
            advantages = centred / (_deviation(sums_of_squares, sizes, std)[member_of] + eps)
        case "group_mean":
            advantages = centred
        case "leave_one_out":
            advantages = centred * (sizes / np.maximum(sizes - 1, 1))[member_of]
        case "batch_norm":
            deviation = _deviation((centred**2).sum(), np.array(len(rewards)), std)
            advantages = centred / (deviation + eps)
        case _:
            raise ValueError(
                "grpo.advantage must be group_norm, group_mean, leave_one_out or batch_norm, "
                f"got {kind!r}."
            )
    return (advantages * _length_factors(completion_lengths, length_power)).astype(np.float32)


def informative_samples(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Which samples are in a group that says something: its rewards are not all equal.

    The predicate of DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476). A group
    of one sample is not informative.

    Args:
        rewards: [samples] float.
        group_ids: [samples] int.

    Returns:
        [samples] bool.
    """
    _, member_of = np.unique(group_ids, return_inverse=True)
    num_groups = int(member_of.max(initial=-1)) + 1
    highest, lowest = np.full(num_groups, -np.inf), np.full(num_groups, np.inf)
    np.maximum.at(highest, member_of, rewards)
    np.minimum.at(lowest, member_of, rewards)
    return (highest > lowest)[member_of]


def _centred(
    rewards: np.ndarray, group_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards less their group's mean, each one's group, and the groups' sizes."""
    _, member_of, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
    means = np.bincount(member_of, rewards, len(sizes)) / sizes
    # The mean of equal numbers may be off in its last bit, which dividing by a standard
    # deviation of that size would blow up.
    informative = informative_samples(rewards, group_ids)
    return np.where(informative, rewards - means[member_of], 0.0), member_of, sizes


def _deviation(sum_of_squares: np.ndarray, count: np.ndarray, std: str) -> np.ndarray:
    return np.sqrt(sum_of_squares / np.maximum(count - (std == "sample"), 1))


def _length_factors(lengths: np.ndarray, power: float) -> np.ndarray:
    has_tokens = lengths > 0
    if power == 0 or not has_tokens.any():
        return np.ones(len(lengths))
    mean = lengths[has_tokens].mean()
    return np.where(has_tokens, mean / np.maximum(lengths, 1), 1.0) ** power
