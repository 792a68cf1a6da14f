# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares two lists of log-probabilities of the probe tokens."""

import math
from collections.abc import Sequence

from torchtitan.grpo.attestation.bound import Bound
from torchtitan.grpo.inference.client import ServerError


class AttestationFailed(ServerError):
    """A server does not rate the probe tokens as the trainer does."""


def compare(expected: Sequence[float], served: Sequence[float], bound: Bound) -> float:
    """Checks that the server's log-probabilities equal the trainer's; returns their difference.

    Args:
        expected: The trainer's, [num_tokens - 1].
        served: The server's, [num_tokens - 1].
        bound: Largest mean absolute difference.

    Raises:
        AttestationFailed: If they differ, or are not finite.
    """
    mean, where = mean_difference(expected, served)
    if not mean <= bound.value:
        largest = abs(expected[where] - served[where])
        raise AttestationFailed(
            "The server's log-probabilities of the probe tokens must equal the trainer's within "
            f"{bound.describe()} on average, but they differ by {mean:.3g}, at most by {largest:.3g} "
            f"at position {where} (trainer {expected[where]:.5f}, server {served[where]:.5f}). Either "
            "the server does not serve the weights that were sent, or it computes less exactly "
            "than weight_sync.attest_tolerance allows."
        )
    return mean


def mean_difference(expected: Sequence[float], served: Sequence[float]) -> tuple[float, int]:
    """Returns the mean absolute difference, and the position of the largest one.

    Raises:
        AttestationFailed: If the numbers of values differ, or a value is not finite.
    """
    if len(expected) != len(served) or not expected:
        raise AttestationFailed(
            f"The server must return {len(expected)} log-probabilities of the probe tokens, "
            f"got {len(served)}."
        )
    differences = [abs(e - s) for e, s in zip(expected, served, strict=True)]
    for whose, values in (("trainer", expected), ("server", served)):
        for position, value in enumerate(values):
            if not math.isfinite(value):
                raise AttestationFailed(
                    "All log-probabilities of the probe tokens must be finite, but the "
                    f"{whose}'s at position {position} is {value}."
                )
    return sum(differences) / len(differences), differences.index(max(differences))
