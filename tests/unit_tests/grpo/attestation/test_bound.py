# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How much a server may differ: measured under weights that both sides have, within limits."""

import asyncio
import logging
from typing import Any

import pytest
import torch

from torchtitan.grpo.attestation import (
    Attestation,
    AttestationFailed,
    Probes,
    ServerAttestation,
    tolerances_of,
)
from torchtitan.grpo.attestation.bound import bound_for

INITIAL, LATER = [-4.0, -6.0, -5.0], [-3.0, -7.0, -4.5]


class Server:
    """Serves its own weights until it is pushed to; its kernels differ by ``offset`` nats."""

    url = "http://a"

    def __init__(self, offset: float, own: list[float] = INITIAL) -> None:
        self.offset, self.weights = offset, own
        self.served: int | None = None

    async def version(self) -> int | None:
        return self.served

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return [logprob - self.offset for logprob in self.weights]

    def take(self, version: int, weights: list[float]) -> None:
        self.served, self.weights = version, weights


def attest(
    server: Server,
    *pushed: list[float],
    dtype: torch.dtype = torch.bfloat16,
    configured: float = 0.0,
    is_resumed: bool = False,
    is_lost: bool = False,
) -> None:
    """Attests versions 0, 1, ... of the given weights; with ``is_lost`` the last is not taken."""
    probes = Probes(num_kept=1)
    first = 10 if is_resumed else 0
    common = Attestation(1, [1, 2, 3, 4], probes, tolerances_of(dtype, configured), 30.0)
    client: Any = server
    attestation = ServerAttestation(common, client)

    async def body() -> None:
        await attestation.observe()
        for version, weights in enumerate(pushed, first):
            probes.put(version, weights)
            is_last = version == first + len(pushed) - 1
            server.take(version, server.weights if is_lost and is_last else weights)
            assert await attestation.check(version)

    asyncio.run(body())


def test_a_server_whose_kernels_differ_by_much_is_attested_and_the_three_numbers_are_told(caplog):
    with caplog.at_level(logging.INFO):
        attest(Server(0.12), INITIAL, LATER, LATER)
    (said,) = [r.getMessage() for r in caplog.records if "is attested within" in r.getMessage()]
    assert said == (
        "http://a is attested within 0.36 (0.12 was measured when both sides had the same "
        "weights; kernels explain at most 0.5)."
    )


def test_a_push_that_was_not_taken_is_found_also_by_a_measured_bound():
    with pytest.raises(AttestationFailed, match=r"within 0\.36 \(0\.12 was .* differ by 0\.87"):
        attest(Server(0.12), INITIAL, LATER, is_lost=True)


def test_a_difference_that_no_kernel_explains_is_refused():
    server = Server(0.2)
    with pytest.raises(
        AttestationFailed, match=r"within 0\.02 on average, but they differ by 0\.2"
    ):
        attest(server, INITIAL, dtype=torch.float32)
    attest(Server(0.2), INITIAL)  # in bfloat16 it may be the kernels


def test_a_server_that_was_started_with_other_weights_is_measured_after_its_first_push(caplog):
    with caplog.at_level(logging.INFO):
        attest(Server(0.1, own=LATER), INITIAL, LATER)
    assert "so it was started with other weights, or it computes wrongly" in caplog.text
    assert "attested within 0.3 (0.1 was measured" in caplog.text


def test_a_resumed_run_measures_after_the_first_push():
    attest(Server(0.15), LATER, INITIAL, is_resumed=True)
    with pytest.raises(AttestationFailed, match=r"within 0\.45 \(0\.15 was measured"):
        attest(Server(0.15), INITIAL, LATER, is_resumed=True, is_lost=True)


def test_a_configured_tolerance_is_the_bound_of_every_server():
    with pytest.raises(AttestationFailed, match=r"within 0\.1 on average"):
        attest(Server(0.12), INITIAL, configured=0.1)
    attest(Server(0.12), INITIAL, configured=0.13)


@pytest.mark.parametrize(
    ("measured", "dtype", "value"),
    [
        (0.0, torch.bfloat16, 0.05),
        (0.1, torch.bfloat16, 0.3),
        (0.3, torch.bfloat16, 0.5),
        (1e-6, torch.float32, 1e-3),
        (0.01, torch.float32, 0.02),
    ],
)
def test_the_bound_lies_between_the_limits(measured: float, dtype: torch.dtype, value: float):
    assert bound_for(measured, tolerances_of(dtype, 0.0)).value == pytest.approx(value)
