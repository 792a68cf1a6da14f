# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares what one server rates with what the trainer does, push after push."""

import asyncio
import logging
from dataclasses import dataclass

from torchtitan.grpo.attestation.bound import Bound, Tolerances, bound_for
from torchtitan.grpo.attestation.comparison import AttestationFailed, compare, mean_difference
from torchtitan.grpo.attestation.probes import Probes, is_attested
from torchtitan.grpo.inference.client import InferenceClient

logger = logging.getLogger(__name__)


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
        self._may_observe = True

    async def observe(self) -> None:
        """Lets the server rate the probe tokens before the first push to it.

        Only the first call has an effect, because a server whose update was interrupted reports no
        version either.

        Raises:
            ServerError: If the server failed to rate the tokens.
            TimeoutError: If the server did not rate the tokens in time.
        """
        if not self._attestation.every or self._attestation.tolerances.is_fixed:
            return
        if self._may_observe and await self._client.version() is None:
            self._before = await self._rated("its own weights")
        self._may_observe = False

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
