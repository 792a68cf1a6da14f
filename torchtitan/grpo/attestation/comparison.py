# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares a server's log-probabilities with the trainer's, within a bound measured for each
server.

The difference between the kernels of trainer and server depends on the GPU, the model and the
server's settings. A bound that fits every machine would notice nothing. So the difference is
measured once, under weights that both sides are known to have: a server that nobody has pushed
to serves the directory that the trainer has loaded as well. A multiple of that difference is
the bound from then on. A difference beyond what kernels can explain is never taken as the
measure.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan.grpo.attestation.probes import Probes, is_attested
from torchtitan.grpo.inference.client import InferenceClient, ServerError

logger = logging.getLogger(__name__)

# The bound is this multiple of the measured difference: training sharpens distributions, and the
# difference grows with them.
_FACTOR = 3.0
# Under float32, kernels differ in the order of their sums, or compute products in TF32. Under
# bfloat16 they also round in other places, and a mixture of experts may choose other experts.
_FLOORS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
_CEILINGS = {torch.float32: 0.02, torch.bfloat16: 0.5}


class AttestationFailed(ServerError):
    """A server does not rate the probe tokens as the trainer does."""


@dataclass(frozen=True)
class Tolerances:
    """The limits between which bounds are chosen, in nats.

    ``ceiling`` is the largest difference that kernels can explain. If it equals the floor,
    nothing is measured.
    """

    floor: float
    ceiling: float

    @property
    def is_fixed(self) -> bool:
        return self.floor == self.ceiling


def tolerances_of(wire_dtype: torch.dtype, configured: float) -> Tolerances:
    """Returns the limits of a run. ``configured`` is ``weight_sync.attest_tolerance``."""
    if configured > 0:
        return Tolerances(configured, configured)
    return Tolerances(_FLOORS[wire_dtype], _CEILINGS[wire_dtype])


@dataclass(frozen=True)
class Bound:
    """Largest mean difference that a server may show, in nats.

    ``measured`` is the difference by which it was chosen; ``None`` if none was measured.
    """

    value: float
    measured: float | None
    ceiling: float

    @classmethod
    def of(cls, measured: float | None, tolerances: Tolerances) -> "Bound":
        """Returns the bound for a mean difference under weights that both sides have."""
        if tolerances.is_fixed or measured is None:
            return cls(tolerances.ceiling, None, tolerances.ceiling)
        assert measured <= tolerances.ceiling, (measured, tolerances)
        value = min(max(tolerances.floor, _FACTOR * measured), tolerances.ceiling)
        return cls(value, measured, tolerances.ceiling)

    def describe(self) -> str:
        if self.measured is None:
            return f"{self.value:g}"
        return (
            f"{self.value:.3g} ({self.measured:.3g} was measured when both sides had the same "
            f"weights; kernels explain at most {self.ceiling:g})"
        )


def compare(expected: Sequence[float], served: Sequence[float], bound: Bound) -> float:
    """Returns the mean absolute difference of log-probabilities, [num_tokens - 1] each.

    Raises :class:`AttestationFailed` if it exceeds the bound, or if values are not finite.
    """
    mean, where = _mean_difference(expected, served)
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


def _mean_difference(expected: Sequence[float], served: Sequence[float]) -> tuple[float, int]:
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
    """The proof that all servers must give after a push.

    Attributes:
        every: Versions divisible by this are attested by log-probabilities; 0 attests none.
        tokens: Token ids that trainer and server rate.
        probes: The trainer's log-probabilities of these tokens.
        tolerances: Limits of the mean absolute difference.
        timeout_seconds: Time for the trainer, and then for the server, to rate them.
    """

    every: int
    tokens: list[int]
    probes: Probes
    tolerances: Tolerances
    timeout_seconds: float


class ServerAttestation:
    def __init__(self, attestation: Attestation, client: InferenceClient) -> None:
        self._attestation, self._client = attestation, client
        self._before: list[float] | None = None
        self._bound: Bound | None = None
        self._may_observe = True

    async def observe(self) -> None:
        """Lets the server rate the probe tokens before the first push to it.

        Only the first call has an effect, because a server whose update was interrupted reports
        no version either. Raises :class:`ServerError` or ``TimeoutError`` as :meth:`check`.
        """
        if not self._attestation.every or self._attestation.tolerances.is_fixed:
            return
        if self._may_observe and await self._client.version() is None:
            self._before = await self._rated("its own weights")
        self._may_observe = False

    async def check(self, version: int) -> bool:
        """Compares the server's log-probabilities with the trainer's.

        Returns ``False`` without a comparison if the version need not be attested, or if the
        trainer does not have its own in time, for which the server is not to blame.

        Raises:
            AttestationFailed: If they differ.
            ServerError: If the server failed to rate the tokens.
            TimeoutError: If the server did not rate the tokens in time.
        """
        common, url = self._attestation, self._client.url
        if not is_attested(version, common.every):
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
            mean = compare(expected, served, Bound.of(None, common.tolerances))
            self._set_bound(mean)
        return True

    def _measured_before(self) -> Bound | None:
        """The bound by what the server rated before its first push, if that is known."""
        before, initial = self._before, self._attestation.probes.initial
        if before is None or initial is None:
            return None
        try:
            mean, _ = _mean_difference(initial, before)
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
        self._bound = bound = Bound.of(mean, self._attestation.tolerances)
        if not self._attestation.tolerances.is_fixed:
            logger.info("%s is attested within %s.", self._client.url, bound.describe())
        return bound

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
