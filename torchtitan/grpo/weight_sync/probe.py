# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Attestation by log-probabilities: a server must rate fixed tokens as the trainer does.

Stronger than the server's word about its version, since what is compared was computed from
the weights. Dropout is off and no token is sampled, so both sides compute the same but for
rounding.
"""

import asyncio
import math
import random
import threading
import time
from collections.abc import Sequence

from torchtitan.grpo.inference.client import ServerError

_POLL_SECONDS = 0.02


def probe_tokens(vocab_size: int, num_tokens: int = 48, seed: int = 20) -> list[int]:
    """Fixed token ids, the same in every process; [num_tokens].

    Drawn from all of the vocabulary, so that differences in its rows show.

    Raises:
        ValueError: There is no token, or nothing to predict.
    """
    if vocab_size < 1 or num_tokens < 2:
        raise ValueError(
            "Probe tokens need a vocabulary of at least 1 and at least 2 tokens, "
            f"got {vocab_size} and {num_tokens}."
        )
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]


def is_attested(version: int, every: int) -> bool:
    """Whether ``version`` is attested under ``weight_sync.attest_every``."""
    return every > 0 and version % every == 0


class Probes:
    """What the trainer expects of each attested version; safe to use from any thread.

    Args:
        num_kept: The newest this many versions are kept.
    """

    def __init__(self, num_kept: int = 4) -> None:
        if num_kept < 1:
            raise ValueError(f"At least one version must be kept, got num_kept = {num_kept}.")
        self._num_kept = num_kept
        self._changed = threading.Lock()
        self._expected: dict[int, tuple[float, ...]] = {}

    def put(self, version: int, logprobs: Sequence[float]) -> None:
        """Keeps what ``version`` gives; called by the training thread.

        Args:
            version: Policy version.
            logprobs: Of each probe token but the first, [num_tokens - 1].
        """
        with self._changed:
            self._expected[version] = tuple(float(logprob) for logprob in logprobs)
            for oldest in sorted(self._expected)[: -self._num_kept]:
                del self._expected[oldest]

    def get(self, version: int) -> tuple[float, ...] | None:
        """What ``version`` gives; None where that is not known yet, or no longer."""
        with self._changed:
            return self._expected.get(version)

    async def wait_for(self, version: int, timeout_seconds: float) -> tuple[float, ...] | None:
        """What ``version`` gives, once the training thread has said so.

        Returns:
            None where newer ones have taken its place: a lane that is this late is given
            its next version soon.

        Raises:
            TimeoutError: Not in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            expected = self.get(version)
            if expected is not None or self._is_past(version):
                return expected
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"The trainer's log-probabilities of policy_version {version} were not there "
                    f"within {timeout_seconds:g} s, so no server can be attested with it "
                    "(weight_sync.attest_every)."
                )
            # Polled: the training thread must not have to wake up another thread's loop.
            await asyncio.sleep(_POLL_SECONDS)

    def _is_past(self, version: int) -> bool:
        with self._changed:
            kept = self._expected
            return len(kept) == self._num_kept and version < min(kept) and version not in kept


def compare(expected: Sequence[float], served: Sequence[float], tolerance: float) -> None:
    """Returns when the server's log-probabilities equal the trainer's.

    Args:
        expected: The trainer's, [num_tokens - 1].
        served: The server's, [num_tokens - 1].
        tolerance: Largest mean absolute difference.

    Raises:
        ServerError: They differ, or are not numbers.
    """
    if len(expected) != len(served) or not expected:
        raise ServerError(
            f"The server must give {len(expected)} log-probabilities of the probe tokens, "
            f"got {len(served)}."
        )
    differences = [abs(e - s) for e, s in zip(expected, served, strict=True)]
    for whose, values in (("trainer", expected), ("server", served)):
        for position, value in enumerate(values):
            if not math.isfinite(value):
                raise ServerError(
                    f"All log-probabilities of the probe tokens must be finite, the {whose}'s "
                    f"at position {position} is {value}."
                )
    mean, largest = sum(differences) / len(differences), max(differences)
    if not mean <= tolerance:
        where = differences.index(largest)
        raise ServerError(
            f"The server's log-probabilities of the probe tokens must equal the trainer's within "
            f"{tolerance:g} on average, they differ by {mean:.3g}, at most by {largest:.3g} at "
            f"position {where} (trainer {expected[where]:.5f}, server {served[where]:.5f}). It "
            "does not serve the weights that were sent; or it computes less exactly than "
            "weight_sync.attest_tolerance allows."
        )
