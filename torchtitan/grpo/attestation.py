# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks by log-probabilities that a server serves the weights that were pushed to it.

The server must rate fixed tokens as the trainer does.

This is stronger evidence than the version that the server reports, because the compared
numbers are computed from the weights. Dropout is off and no token is sampled, so both sides
compute the same numbers except for what their kernels round differently; see
`attestation_bound.py`.
"""

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.grpo.attestation_bound import Bound, Tolerances, bound_for
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

    Those of version 0, the weights with which a run begins, are kept for good.

    Args:
        num_kept: Number of versions that are kept, which are the newest ones.
    """

    def __init__(self, num_kept: int = 4) -> None:
        if num_kept < 1:
            raise ValueError(f"At least one version must be kept, got num_kept = {num_kept}.")
        self._num_kept = num_kept
        self._changed = threading.Lock()
        self._expected: dict[int, tuple[float, ...]] = {}
        self._initial: tuple[float, ...] | None = None

    @property
    def initial(self) -> tuple[float, ...] | None:
        """The log-probabilities under version 0; ``None`` in a run that was resumed."""
        with self._changed:
            return self._initial

    def put(self, version: int, logprobs: Sequence[float]) -> None:
        """Stores the log-probabilities under ``version``; called by the training thread.

        Args:
            version: Policy version.
            logprobs: Log-probability of each probe token but the first, [num_tokens - 1].
        """
        with self._changed:
            self._expected[version] = tuple(float(logprob) for logprob in logprobs)
            if version == 0:
                self._initial = self._expected[0]
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


@dataclass(frozen=True)
class Attestation:
    """What servers must prove after a push; the same for all of them.

    Attributes:
        every: Versions divisible by this are attested by log-probabilities; 0 attests none.
        tokens: Token ids that trainer and server rate.
        probes: The trainer's log-probabilities of these tokens.
        tolerances: Limits of the mean absolute difference.
        timeout_seconds: How long the trainer, and then the server, may take to rate them.
    """

    every: int
    tokens: list[int]
    probes: Probes
    tolerances: Tolerances
    timeout_seconds: float

    def concerns(self, version: int) -> bool:
        """Returns whether ``version`` is attested by log-probabilities."""
        return is_attested(version, self.every)


class ServerAttestation:
    """Compares the log-probabilities of one server with the trainer's.

    Args:
        attestation: What the server must prove.
        client: The server.
    """

    def __init__(self, attestation: Attestation, client: InferenceClient) -> None:
        self._attestation, self._client = attestation, client
        self._before: list[float] | None = None
        self._bound: Bound | None = None

    async def observe(self) -> None:
        """Rates the probe tokens by a server that nobody has pushed to; called before a push.

        Such a server is a new process, perhaps on another machine, so its bound is measured anew.

        Raises:
            ServerError: If the server failed to rate the tokens.
            TimeoutError: If the server did not rate the tokens in time.
        """
        if not self._attestation.every or self._attestation.tolerances.is_fixed:
            return
        if await self._client.version() is None:
            self._before, self._bound = await self._rated("its own weights"), None

    async def check(self, version: int) -> bool:
        """Compares the server's log-probabilities with the trainer's.

        Returns:
            Whether they were compared. They are not if the version need not be attested, or
            if the trainer does not have its own in time. The server is not to blame for that.

        Raises:
            AttestationFailed: If they differ.
            ServerError: If the server failed to rate the tokens.
            TimeoutError: If the server did not rate the tokens in time.
        """
        common, url = self._attestation, self._client.url
        if not common.concerns(version):
            return False
        try:
            expected = await common.probes.wait_for(version, common.timeout_seconds)
        except TimeoutError as error:
            logger.warning("%s serves version %d, unattested: %s", url, version, error)
            return False
        if expected is None:
            return False  # the trainer is far ahead, and a newer version will be pushed soon
        if self._bound is None:
            self._bound = self._measured_before()
        served = await self._rated(f"version {version}")
        if self._bound is not None:
            compare(expected, served, self._bound)
        else:
            # Never measured: the weights that were just pushed are the first that both have.
            mean = compare(expected, served, bound_for(None, common.tolerances))
            self._set_bound(mean)
        return True

    def _measured_before(self) -> Bound | None:
        """Returns the bound by what the server rated before its first push, if that is known."""
        before, initial = self._before, self._attestation.probes.initial
        if self._attestation.tolerances.is_fixed or before is None or initial is None:
            return None
        try:
            mean, _ = mean_difference(initial, before)
        except AttestationFailed:
            return None  # the comparison after the push says what is wrong
        ceiling = self._attestation.tolerances.ceiling
        if mean <= ceiling:
            return self._set_bound(mean)
        logger.warning(
            "%s rated the probe tokens before its first push otherwise than the trainer does under "
            "model.hf_assets_path, by %.3g on average. Kernels explain at most %g, so it was "
            "started with other weights, or it computes wrongly. Its first attestation decides.",
            self._client.url, mean, ceiling,
        )  # fmt: skip
        return None

    def _set_bound(self, mean: float) -> Bound:
        self._bound = bound = bound_for(mean, self._attestation.tolerances)
        if not self._attestation.tolerances.is_fixed:
            logger.info("%s is attested within %s.", self._client.url, bound.describe())
        return bound

    async def _rated(self, weights: str) -> list[float]:
        # The request waits its turn among those that generate.
        seconds = self._attestation.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._client.prompt_logprobs(self._attestation.tokens)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self._client.url} must rate the probe tokens under {weights} within "
                f"weight_sync.timeout_seconds = {seconds:g} and did not. It is overloaded or has "
                "stopped."
            ) from error
