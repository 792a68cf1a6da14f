# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks by log-probabilities that a server serves the weights that were pushed to it.

The server must rate fixed tokens as the trainer does.

This is stronger evidence than the version that the server reports, because the compared
numbers are computed from the weights. Dropout is off and no token is sampled, so both sides
compute the same numbers except for rounding.
"""

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.job_config import JobConfig

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_PROBE_LENGTH = 48


class AttestationFailed(ServerError):
    """A server does not rate the probe tokens as the trainer does."""


def attested_tokens(config: JobConfig, vocab_size: int) -> list[int]:
    """Returns the probe tokens of a run, short enough for the trainer and the servers."""
    longest = config.inference.max_model_len or config.training.seq_len
    return probe_tokens(
        vocab_size, max(2, min(_PROBE_LENGTH, longest - 1, config.training.seq_len))
    )


def probe_tokens(vocab_size: int, num_tokens: int = 48, seed: int = 20) -> list[int]:
    """Returns fixed token ids, the same in every process; [num_tokens].

    They are drawn from the whole vocabulary, so that differences in any of the embedding's
    rows may show.

    Raises:
        ValueError: If the vocabulary is empty, or if there is no token to predict.
    """
    if vocab_size < 1 or num_tokens < 2:
        raise ValueError(
            "Probe tokens need a vocabulary of at least 1 token and a length of at least 2, "
            f"got {vocab_size} and {num_tokens}."
        )
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]


def is_attested(version: int, every: int) -> bool:
    """Returns whether ``version`` is attested under ``weight_sync.attest_every``."""
    return every > 0 and version % every == 0


class Probes:
    """The trainer's log-probabilities of attested versions; safe to use from any thread.

    Args:
        num_kept: Number of versions that are kept, which are the newest ones.
    """

    def __init__(self, num_kept: int = 4) -> None:
        if num_kept < 1:
            raise ValueError(f"At least one version must be kept, got num_kept = {num_kept}.")
        self._num_kept = num_kept
        self._changed = threading.Lock()
        self._expected: dict[int, tuple[float, ...]] = {}

    def put(self, version: int, logprobs: Sequence[float]) -> None:
        """Stores the log-probabilities under ``version``; called by the training thread.

        Args:
            version: Policy version.
            logprobs: Log-probability of each probe token but the first, [num_tokens - 1].
        """
        with self._changed:
            self._expected[version] = tuple(float(logprob) for logprob in logprobs)
            for oldest in sorted(self._expected)[: -self._num_kept]:
                del self._expected[oldest]

    def get(self, version: int) -> tuple[float, ...] | None:
        """Returns the log-probabilities under ``version``; ``None`` if they are not stored."""
        with self._changed:
            return self._expected.get(version)

    async def wait_for(self, version: int, timeout_seconds: float) -> tuple[float, ...] | None:
        """Waits until the training thread has stored the log-probabilities under ``version``.

        Returns:
            The log-probabilities, or ``None`` if newer ones have replaced them. A lane that is
            so late will soon be given its next version.

        Raises:
            TimeoutError: If they are not stored within ``timeout_seconds``.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            expected = self.get(version)
            if expected is not None or self._is_past(version):
                return expected
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "The trainer must compute its own log-probabilities of the probe tokens under "
                    f"policy_version {version} within {timeout_seconds:g} s and did not, so no "
                    "server can be attested with this version (weight_sync.attest_every)."
                )
            # Polled, so that the training thread need not wake up another thread's loop.
            await asyncio.sleep(_POLL_SECONDS)

    def _is_past(self, version: int) -> bool:
        with self._changed:
            kept = self._expected
            return len(kept) == self._num_kept and version < min(kept) and version not in kept


def compare(expected: Sequence[float], served: Sequence[float], tolerance: float) -> None:
    """Checks that the server's log-probabilities equal the trainer's.

    Args:
        expected: The trainer's, [num_tokens - 1].
        served: The server's, [num_tokens - 1].
        tolerance: Largest mean absolute difference.

    Raises:
        AttestationFailed: If they differ, or are not finite.
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
    mean, largest = sum(differences) / len(differences), max(differences)
    if not mean <= tolerance:
        where = differences.index(largest)
        raise AttestationFailed(
            "The server's log-probabilities of the probe tokens must equal the trainer's within "
            f"{tolerance:g} on average, but they differ by {mean:.3g}, at most by {largest:.3g} at "
            f"position {where} (trainer {expected[where]:.5f}, server {served[where]:.5f}). Either "
            "the server does not serve the weights that were sent, or it computes less exactly "
            "than weight_sync.attest_tolerance allows."
        )


@dataclass(frozen=True)
class Attestation:
    """Compares log-probabilities with a server after a push.

    Attributes:
        every: Versions divisible by this are attested by log-probabilities; 0 attests none.
        tokens: Token ids that trainer and server rate.
        probes: The trainer's log-probabilities of these tokens.
        tolerance: Largest mean absolute difference.
        timeout_seconds: How long the trainer, and then the server, may take to rate them.
    """

    every: int
    tokens: list[int]
    probes: Probes
    tolerance: float
    timeout_seconds: float

    def concerns(self, version: int) -> bool:
        """Returns whether ``version`` is attested by log-probabilities."""
        return is_attested(version, self.every)

    async def check(self, client: InferenceClient, version: int) -> bool:
        """Compares a server's log-probabilities with the trainer's.

        Returns:
            Whether they were compared. They are not if the version need not be attested, or
            if the trainer does not have its own in time. The server is not to blame for that.

        Raises:
            AttestationFailed: If they differ.
            ServerError: If the server failed to rate the tokens.
            TimeoutError: If the server did not rate the tokens in time.
        """
        if not self.concerns(version):
            return False
        try:
            expected = await self.probes.wait_for(version, self.timeout_seconds)
        except TimeoutError as error:
            logger.warning("%s serves version %d, unattested: %s", client.url, version, error)
            return False
        if expected is None:
            return False  # the trainer is far ahead, and a newer version will be pushed soon
        compare(expected, await self._rated(client, version), self.tolerance)
        return True

    async def _rated(self, client: InferenceClient, version: int) -> list[float]:
        # The request waits its turn among those that generate.
        try:
            async with asyncio.timeout(self.timeout_seconds):
                return await client.prompt_logprobs(self.tokens)
        except TimeoutError as error:
            raise TimeoutError(
                f"{client.url} must rate the probe tokens under version {version} within "
                f"weight_sync.timeout_seconds = {self.timeout_seconds:g} and did not. It is "
                "overloaded or has stopped."
            ) from error
