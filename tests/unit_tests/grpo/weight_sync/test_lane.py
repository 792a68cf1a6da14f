# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a lane makes of an attestation, by whoever fails to say what it gives."""

import asyncio
import logging
from typing import Any

import pytest

from torchtitan.grpo.attestation import Attestation, Probes
from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.weight_sync.lane import Lane, Listeners
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.transports.interface import PushReport
from torchtitan.grpo.weight_sync.versions import Versions

VERSION = 4
PATIENCE = 30.0
SYNC = WeightSync(push_timeout_seconds=PATIENCE, retry_seconds=PATIENCE, max_retry_seconds=PATIENCE)


class Server:
    """Takes every push at once; rates the probe tokens as it is told, None never."""

    url = "http://a"
    takes_deltas = False
    stops_for = "nothing"

    def __init__(self, logprobs: list[float] | None) -> None:
        self._logprobs = logprobs

    async def version(self) -> int:
        return VERSION

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        if self._logprobs is None:
            await asyncio.Event().wait()
        return list(self._logprobs or ())


class Way:
    """To a server that never refuses."""

    def __init__(self, client: Server) -> None:
        self.client = client

    async def join(self) -> None: ...

    async def push(self, version: int, base: int | None) -> PushReport:
        return PushReport(version, "all", 1, 0.1, 0.1, 0.0)

    async def recover(self) -> None: ...


def attested(expected: list[float] | None, served: list[float] | None) -> tuple[Lane, str]:
    """The lane after its first push, and what became of the server: served, or why lost."""

    async def drop(version: int) -> None: ...

    async def body() -> tuple[Lane, str]:
        probes, versions = Probes(), Versions(SlotTable(2), 2, drop)
        if expected is not None:
            probes.put(VERSION, expected)
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server: Any = Server(served)
        way: Any = Way(server)
        attestation = Attestation(2, [1, 2, 3], probes, 1e-3, timeout_seconds=0.05)
        lane = Lane(
            way,
            versions,
            SYNC,
            attestation,
            Listeners(
                on_change=lambda: None,
                on_version=lambda url, version: outcome.set_result(f"serves {version}"),
                on_lost=lambda url, reason: outcome.set_result(reason),
            ),
        )
        await versions.begin(VERSION)
        running = asyncio.create_task(lane.run())
        said = await asyncio.wait_for(outcome, PATIENCE)
        running.cancel()
        return lane, said

    return asyncio.run(body())


def test_a_server_that_rates_tokens_as_the_trainer_does_is_attested():
    lane, said = attested([-1.0, -2.0], [-1.0, -2.0])
    assert (said, lane.num_attested) == (f"serves {VERSION}", 1)


def test_a_server_that_rates_tokens_otherwise_is_lost():
    lane, said = attested([-1.0, -2.0], [-1.0, -2.5])
    assert "must equal the trainer's" in said
    assert lane.num_attested == 0


def test_a_trainer_that_is_late_costs_no_server(caplog):
    with caplog.at_level(logging.WARNING):
        lane, said = attested(None, [-1.0, -2.0])
    assert (said, lane.num_attested, lane.num_failures) == (f"serves {VERSION}", 0, 0)
    assert f"http://a serves version {VERSION}, unattested" in caplog.text


def test_a_server_that_does_not_rate_tokens_in_time_is_lost():
    lane, said = attested([-1.0, -2.0], None)
    assert "http://a must rate the probe tokens" in said
    assert "weight_sync.timeout_seconds = 0.05" in said
    assert lane.num_attested == 0


@pytest.mark.parametrize("every", [0, 3])
def test_other_versions_need_no_rating(every):
    probes = Probes()
    assert not Attestation(every, [1, 2], probes, 1e-3, 1.0).concerns(VERSION)
