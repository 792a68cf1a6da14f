# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Log-probabilities of fixed tokens: kept by version, compared within a measured bound."""

import asyncio
import logging
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.weight_sync.attestation import (
    Attestation,
    AttestationFailed,
    Bound,
    Probes,
    SentTensors,
    ServerAttestation,
    attested_tokens,
    compare,
    tolerances_of,
)

INITIAL, LATER = [-4.0, -6.0, -5.0], [-3.0, -7.0, -4.5]
TRAINER = [-1.0, -2.0]


class Server:
    url = "http://a"

    def __init__(self, offset: float, own: list[float] = INITIAL) -> None:
        self.offset, self.weights = offset, own
        self.served: int | None = None
        self.checksums: dict[str, int] | None = None

    async def version(self) -> int | None:
        return self.served

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return [logprob - self.offset for logprob in self.weights]

    async def served_checksums(self, dtype: str) -> dict[str, int] | None:
        return self.checksums if dtype == "bfloat16" else None

    def take(self, version: int, weights: list[float]) -> None:
        self.served, self.weights = version, weights


async def attest(
    server: Server,
    *pushed: list[float],
    dtype: torch.dtype = torch.bfloat16,
    is_resumed: bool = False,
    is_lost: bool = False,
    sent: SentTensors | None = None,
) -> None:
    """Attests versions 0, 1, ... of the given weights; with ``is_lost`` the last is not taken."""
    probes = Probes(num_kept=1)
    first = 10 if is_resumed else 0
    common = Attestation(1, [1, 2, 3, 4], probes, tolerances_of(dtype), 30.0, sent)
    client: Any = server
    attestation = ServerAttestation(common, client)
    await attestation.observe()
    for version, weights in enumerate(pushed, first):
        probes.put(version, weights)
        is_last = version == first + len(pushed) - 1
        server.take(version, server.weights if is_lost and is_last else weights)
        assert await attestation.check(version)


async def test_a_server_whose_kernels_differ_by_much_is_attested_with_its_numbers(caplog):
    with caplog.at_level(logging.INFO):
        await attest(Server(0.12), INITIAL, LATER, LATER)
    (said,) = [r.getMessage() for r in caplog.records if "is attested within" in r.getMessage()]
    assert said == (
        "http://a is attested within 0.36 (0.12 was measured when both sides had the same "
        "weights; kernels explain at most 0.5)."
    )


async def test_a_push_that_was_not_taken_is_found_also_by_a_measured_bound():
    with pytest.raises(AttestationFailed, match=r"within 0\.36 \(0\.12 was .* differ by 0\.87"):
        await attest(Server(0.12), INITIAL, LATER, is_lost=True)


async def test_a_difference_that_no_kernel_explains_is_refused():
    message = r"within 0\.02 on average, but they differ by 0\.2"
    with pytest.raises(AttestationFailed, match=message):
        await attest(Server(0.2), INITIAL, dtype=torch.float32)
    await attest(Server(0.2), INITIAL)  # in bfloat16 it may be the kernels


async def test_a_server_with_other_weights_is_measured_after_its_first_push(caplog):
    with caplog.at_level(logging.INFO):
        await attest(Server(0.1, own=LATER), INITIAL, LATER)
    assert "so it was started with other weights, or it computes wrongly" in caplog.text
    assert "attested within 0.3 (0.1 was measured" in caplog.text


async def test_a_resumed_run_measures_after_the_first_push():
    await attest(Server(0.15), LATER, INITIAL, is_resumed=True)
    with pytest.raises(AttestationFailed, match=r"within 0\.45 \(0\.15 was measured"):
        await attest(Server(0.15), INITIAL, LATER, is_resumed=True, is_lost=True)


@pytest.mark.parametrize(
    ("served", "found"),
    [
        ({"a": 1, "b": 2, "tied": 1}, None),  # it names a tied tensor twice
        ({"a": 1, "b": 3}, "of 1 of 2 differ: b"),
        ({"a": 1}, "of 1 of 2 differ: b"),
        (None, None),  # it cannot tell
    ],
)
async def test_every_tensor_must_be_served_as_it_was_sent(
    served: dict[str, int] | None, found: str | None
):
    async def checksums(version: int) -> dict[str, int]:
        assert served is not None, "nothing is summed up for a server that cannot tell"
        return {"a": 1, "b": 2}

    server = Server(0.1)  # small enough for kernels
    server.checksums = served
    with pytest.raises(AttestationFailed, match=found) if found else nullcontext():
        await attest(server, INITIAL, sent=SentTensors("bfloat16", checksums))
    await attest(server, INITIAL, sent=SentTensors("float32", checksums))  # served in another type


async def test_a_server_is_not_blamed_for_checksums_that_the_trainer_cannot_give(caplog):
    async def checksums(version: int) -> dict[str, int]:
        raise RuntimeError("rank 3 is gone")

    server = Server(0.0)
    server.checksums = {"a": 1}
    await attest(server, INITIAL, sent=SentTensors("bfloat16", checksums))
    assert "whose checksums are missing: rank 3 is gone." in caplog.text


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
    assert tolerances_of(dtype).bound(measured).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("trainer", "served", "message"),
    [
        (
            TRAINER,
            [-1.0, -2.4],
            r"within 0\.05 .* differ by 0\.2, at most by 0\.4 at position 1 "
            r"\(trainer -2\.00000, server -2\.40000\).*than its kernels explain",
        ),
        # Differences of both signs do not cancel.
        (TRAINER, [-1.4, -1.6], r"differ by 0\.4, at most by 0\.4 at position 0"),
        (TRAINER, [-1.0, math.nan], "the server's at position 1 is nan"),
        (TRAINER, [-1.0, -math.inf], "the server's at position 1 is -inf"),
        (TRAINER, [], "must return 2 .* got 0"),
        (TRAINER, [-1.0, -2.0, -3.0], "must return 2 .* got 3"),
        ([-1.0, math.nan], TRAINER, "the trainer's at position 1 is nan"),
    ],
)
def test_a_difference_is_told(trainer: list[float], served: list[float], message: str):
    with pytest.raises(ServerError, match=message):
        compare(trainer, served, Bound(0.05))


def test_probe_tokens_are_the_same_each_time_and_of_the_vocabulary():
    config = JobConfig()
    tokens = attested_tokens(config, 1000)
    assert tokens == attested_tokens(config, 1000)
    assert len(tokens) == 48
    assert all(0 <= token < 1000 for token in tokens)
    assert len(set(tokens)) > 40
    config.inference.max_model_len = 10
    assert attested_tokens(config, 1000) == tokens[:9]


async def test_a_lane_waits_until_the_training_thread_has_said_what_to_expect():
    probes = Probes()
    with pytest.raises(TimeoutError, match=r"policy_version 5 .* 0\.01 s.*sync\.attest_every"):
        await probes.wait_for(5, 0.01)
    waiting = asyncio.create_task(probes.wait_for(5, 30.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.to_thread(probes.put, 5, [-1.0, -2.0])
    assert await waiting == (-1.0, -2.0)


async def test_a_version_that_is_still_to_come_is_waited_for():
    probes = Probes(num_kept=2)
    probes.put(5, [-1.0])
    with pytest.raises(TimeoutError, match="policy_version 4"):
        await probes.wait_for(4, 0.01)


async def test_only_the_newest_versions_are_kept_and_nobody_waits_for_older_ones():
    probes = Probes(num_kept=2)
    for version in (30, 10, 20):
        probes.put(version, [-float(version)])
    kept = [await probes.wait_for(version, 30.0) for version in (10, 20, 30)]
    assert kept == [None, (-20.0,), (-30.0,)]
