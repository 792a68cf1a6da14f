# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that a server serves the weights that were pushed to it.

A server that keeps tensors as they are sent must serve them bit for bit, which checksums verify.
Under bfloat16, nothing else detects small damage: one matrix with 1 % of noise changes
log-probabilities by a tenth of what rounding does. But checksums do not show that the kernels use
these tensors, and some servers fuse or pack tensors, so that checksums cannot be compared.

So each server must also reproduce the trainer's log-probabilities of fixed tokens (the probe).
Dropout is off and no token is sampled, so both sides differ only by the rounding of their kernels,
which depends on GPU, model and the server's settings. The difference is measured once, under weights
that both sides are known to have (a server that nobody has pushed to serves the directory that the
trainer has loaded), and a multiple of it is the bound from then on. A measured difference that is
larger than kernels can explain is never used.
"""

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.inference.client import InferenceClient, ServerError

logger = logging.getLogger(__name__)

# The bound is this multiple of the measured difference: training sharpens distributions, and the
# difference grows with them.
_FACTOR = 3.0
# Under float32, kernels differ in the order of their sums, or compute products in TF32. Under
# bfloat16 they also round in other places, and a mixture of experts may choose other experts.
_FLOORS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
_CEILINGS = {torch.float32: 0.02, torch.bfloat16: 0.5}
_POLL_SECONDS = 0.02
_NUM_TOKENS = 48
_SEED = 20


def attested_tokens(config: JobConfig, vocab_size: int) -> list[int]:
    """Draws the probe tokens of a run from the whole vocabulary, the same in every process."""
    longest = config.inference.max_model_len or config.training.seq_len
    num_tokens = max(2, min(_NUM_TOKENS, longest - 1, config.training.seq_len))
    generator = random.Random(_SEED)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]


def is_attested(version: int, every: int) -> bool:
    return every > 0 and version % every == 0


class Probes:
    """The trainer's log-probabilities of the probe tokens under the last ``num_kept`` versions. Thread-safe.

    Those of version 0 stay in ``initial``, which is ``None`` in a run that was resumed.
    """

    def __init__(self, num_kept: int = 4) -> None:
        self._num_kept = num_kept
        self._lock = threading.Lock()
        self._expected: dict[int, tuple[float, ...]] = {}
        self.initial: tuple[float, ...] | None = None

    def put(self, version: int, logprobs: Sequence[float]) -> None:
        """Stores a version's log-probabilities, [num_tokens - 1]. Called by the training thread."""
        with self._lock:
            self._expected[version] = tuple(map(float, logprobs))
            if version == 0:
                self.initial = self._expected[0]
            for oldest in sorted(self._expected)[: -self._num_kept]:
                del self._expected[oldest]

    async def wait_for(self, version: int, timeout_seconds: float) -> tuple[float, ...] | None:
        """Returns the log-probabilities of ``version`` once they are stored. Raises ``TimeoutError``.

        Returns ``None`` if newer versions have replaced this one: a lane that is so late soon gets a newer one.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            with self._lock:
                expected = self._expected.get(version)
                is_full = len(self._expected) == self._num_kept
                is_past = is_full and version < min(self._expected)
            if expected is not None or is_past:
                return expected
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "The trainer must compute its own log-probabilities of the probe tokens under "
                    f"policy_version {version} within {timeout_seconds:g} s, but they are missing, "
                    "so no server can be attested with this version (weight_sync.attest_every)."
                )
            # Polled, so that the training thread need not wake up another thread's loop.
            await asyncio.sleep(_POLL_SECONDS)


class AttestationFailed(ServerError):
    """A server's weights or its log-probabilities of the probe tokens differ from the trainer's."""


@dataclass(frozen=True)
class Bound:
    """Largest mean difference of logprobs that a server may show, in nats; messages append ``origin``."""

    value: float
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.value:.4g}{self.origin}"


@dataclass(frozen=True)
class Tolerances:
    """Limits of the bound on the mean difference of logprobs (see the module), in nats.

    ``ceiling`` is the largest difference that kernels can explain. The bound is at least ``floor``,
    however small the measured difference is.
    """

    floor: float
    ceiling: float

    def bound(self, measured: float | None) -> Bound:
        """Returns the bound. ``measured`` is the mean difference under weights that both sides had."""
        if measured is None:
            return Bound(self.ceiling)
        assert measured <= self.ceiling, (measured, self)
        return Bound(
            min(max(self.floor, _FACTOR * measured), self.ceiling),
            f" ({measured:.3g} was measured when both sides had the same weights; kernels explain "
            f"at most {self.ceiling:g})",
        )


def tolerances_of(wire_dtype: torch.dtype) -> Tolerances:
    return Tolerances(_FLOORS[wire_dtype], _CEILINGS[wire_dtype])


def compare(expected: Sequence[float], served: Sequence[float], bound: Bound) -> float:
    """Returns the mean absolute difference; raises :class:`AttestationFailed` if it exceeds ``bound``."""
    mean, where = _mean_difference(expected, served)
    if not mean <= bound.value:
        largest = abs(expected[where] - served[where])
        raise AttestationFailed(
            "The server's log-probabilities of the probe tokens must equal the trainer's within "
            f"{bound} on average, but they differ by {mean:.3g}, at most by {largest:.3g} "
            f"at position {where} (trainer {expected[where]:.5f}, server {served[where]:.5f}). Either "
            "the server does not serve the weights that were sent, or it computes less exactly "
            "than its kernels explain."
        )
    return mean


def _mean_difference(expected: Sequence[float], served: Sequence[float]) -> tuple[float, int]:
    if len(expected) != len(served) or not expected:
        raise AttestationFailed(
            f"The server must return {len(expected)} log-probabilities of the probe tokens, "
            f"got {len(served)}."
        )
    for whose, values in (("trainer", expected), ("server", served)):
        for position, value in enumerate(values):
            if not math.isfinite(value):
                raise AttestationFailed(
                    "All log-probabilities of the probe tokens must be finite, but the "
                    f"{whose}'s at position {position} is {value}."
                )
    differences = [abs(e - s) for e, s in zip(expected, served, strict=True)]
    return sum(differences) / len(differences), differences.index(max(differences))


@dataclass(frozen=True)
class SentTensors:
    """``checksums`` returns the checksums, by name, of a version's tensors as sent in ``dtype``."""

    dtype: str
    checksums: Callable[[int], Awaitable[dict[str, int]]]


@dataclass(frozen=True)
class Attestation:
    """How a run attests: it attests the pushes of versions divisible by ``every``, or none if that is 0.

    The trainer, and then the server, must rate ``tokens`` within ``timeout_seconds``. ``sent`` is None
    if servers do not serve the tensors as they are sent.
    """

    every: int
    tokens: list[int]
    probes: Probes
    tolerances: Tolerances
    timeout_seconds: float
    sent: SentTensors | None = None


class ServerAttestation:
    def __init__(self, attestation: Attestation, client: InferenceClient) -> None:
        self._attestation, self._client = attestation, client
        self._before: list[float] | None = None
        self._bound: Bound | None = None
        self._may_observe = True

    async def observe(self) -> None:
        """Lets the server rate the probe tokens before the first push. Raises as :meth:`check`.

        Later calls do nothing: a server that then reports no version may have been interrupted in an
        update, so that its weights are not known.
        """
        if not self._attestation.every:
            return
        if self._may_observe and await self._client.version() is None:
            self._before = await self._rated("its own weights")
        self._may_observe = False

    async def check(self, version: int) -> bool:
        """Compares checksums and log-probabilities; returns False if no comparison is due.

        Log-probabilities are not compared if the trainer does not have its own in time. Raises
        :class:`AttestationFailed`, or ServerError or TimeoutError if the server returned none.
        """
        common, url = self._attestation, self._client.url
        if not is_attested(version, common.every):
            return False
        if common.sent is not None:
            await self._check_tensors(version, common.sent)
        try:
            expected = await common.probes.wait_for(version, common.timeout_seconds)
        except TimeoutError as error:
            logger.warning("%s serves version %d, unattested: %s", url, version, error)
            return False
        if expected is None:
            return False  # the trainer is far ahead, and a newer version will be pushed soon
        if self._bound is None:
            self._measure_before()
        served = await self._rated(f"version {version}")
        mean = compare(expected, served, self._bound or common.tolerances.bound(None))
        if self._bound is None:
            # Never measured: the weights that were just pushed are the first that both have.
            self._set_bound(mean)
        return True

    async def _check_tensors(self, version: int, sent: SentTensors) -> None:
        seconds, url = self._attestation.timeout_seconds, self._client.url
        try:
            async with asyncio.timeout(seconds):
                served = await self._client.served_checksums(sent.dtype)
        except TimeoutError as error:
            raise TimeoutError(
                f"{url} must report the checksums of version {version} within "
                f"weight_sync.timeout_seconds = {seconds:g}, but no answer has arrived."
            ) from error
        if served is None:
            return
        try:
            async with asyncio.timeout(seconds):
                expected = await sent.checksums(version)
        except (TimeoutError, RuntimeError) as error:  # the server is not to blame
            late = f"they have not arrived within weight_sync.timeout_seconds = {seconds:g}"
            logger.warning(
                "%s serves version %d without a comparison of its tensors with those of the ranks "
                "that sent it, whose checksums are missing: %s.",
                url, version, str(error).rstrip(".") or late,
            )  # fmt: skip
            return
        wrong = [name for name, checksum in expected.items() if served.get(name) != checksum]
        if wrong:
            raise AttestationFailed(
                "The server must serve every tensor bit for bit as it was sent, but the checksums "
                f"of {len(wrong)} of {len(expected)} differ: {', '.join(wrong[:3])}. Its memory or "
                "its last update was damaged; all weights are sent to it again."
            )

    def _measure_before(self) -> None:
        before, initial = self._before, self._attestation.probes.initial
        if before is None or initial is None:
            return
        try:
            mean, _ = _mean_difference(initial, before)
        except AttestationFailed:
            return  # the comparison after the push says what is wrong
        ceiling = self._attestation.tolerances.ceiling
        if mean <= ceiling:
            self._set_bound(mean)
            return
        logger.warning(
            "%s rated the probe tokens before its first push otherwise than the trainer does under "
            "model.hf_assets_path, by %.3g on average. Kernels explain at most %g, so it was "
            "started with other weights, or it computes wrongly. Its first attestation decides.",
            self._client.url, mean, ceiling,
        )  # fmt: skip

    def _set_bound(self, mean: float) -> None:
        self._bound = self._attestation.tolerances.bound(mean)
        logger.info("%s is attested within %s.", self._client.url, self._bound)

    async def _rated(self, weights: str) -> list[float]:
        # The request waits for its turn among the requests that generate.
        seconds = self._attestation.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._client.prompt_logprobs(self._attestation.tokens)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self._client.url} must rate the probe tokens under {weights} within "
                f"weight_sync.timeout_seconds = {seconds:g}, but no answer has arrived. The server "
                "is overloaded or has stopped."
            ) from error
