# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A lent server sleeps or has ended whenever the trainer uses its devices, whatever request fails."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from faulty_server import MAX_REQUESTS, NOTHING, FaultyServer, running_lane, until_served

from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.weight_sync import lane as lane_module
from torchtitan.grpo.weight_sync.lane import Lane, LaneEvent

NUM_LOANS = 3
YIELDS = 30  # more than a lane needs for any request that it should not send


class LentServer(FaultyServer):
    """Also sleeps and wakes. It ends if it does not, as the rollout process sees to.

    At the request ``unwanted_at`` the devices are needed, and the lane breaks the request off, which
    the server may have received by then.
    """

    def __init__(self, *faults: Any, unwanted_at: int = 0, is_received: bool = False) -> None:
        super().__init__(*faults)
        self.lane: Lane
        self.is_wanted, self.heard = True, list[str]()
        self.unwanted_at, self._is_received = unwanted_at, is_received

    def _restart(self) -> None:
        super()._restart()
        self.is_asleep = False

    def believe(self, url: str, version: int) -> None:
        if self.is_wanted:  # otherwise, the news come late
            super().believe(url, version)

    def lose(self, url: str) -> None:
        super().lose(url)
        self.heard.append("lost")

    def note_asleep(self, _: str) -> None:
        assert self.is_asleep, "the devices are not free"
        self.heard.append("asleep")

    def serves(self, version: int) -> bool:
        is_last = version == NUM_LOANS  # by then, the fault has happened
        return super().serves(version) if is_last else self.held == self.believed == version

    def cut(self) -> None:
        self.is_wanted, self.believed = False, NOTHING
        self.heard.clear()
        self.lane.set_wanted(False)

    def end(self) -> None:
        self._restart()
        self.late.clear()

    async def _ask(self, request: str, version: int) -> Any:
        if self.is_wanted and self.num_requests + 1 == self.unwanted_at:
            self.num_requests += 1
            self.cut()
            if self._is_received:
                self._handle(request, version)
            if request == "wake":  # it is not broken off
                raise RouteError("wake: no answer in time")
            await asyncio.sleep(60)
        if request in ("sleep", "wake"):  # they exclude each other, so those before are done first
            for late in [late for late in self.late if late[1] in ("sleep", "wake")]:
                self.late.remove(late)
                self._handle_late(*late[1:])
        return await super()._ask(request, version)

    def _handle(self, request: str, version: int) -> None:
        if request == "sleep":
            self.is_asleep, self.update = True, None
            self.held = self.label = NOTHING
        elif request == "wake":
            self.is_asleep = False
        elif self.is_asleep and request in ("begin_update", "bucket", "commit_update"):
            raise RouteError("The server is asleep.")
        super()._handle(request, version)


async def until_free(server: LentServer) -> None:
    """Waits until the server sleeps, or ends it as the rollout process does."""
    while not server.heard:
        assert server.num_requests < MAX_REQUESTS, "it does not fall asleep"
        server.check_lane()
        await asyncio.sleep(0)
    if server.heard[-1] == "lost":
        server.end()
    for _ in range(YIELDS):
        await asyncio.sleep(0)
        assert server.is_asleep or server.heard[-1] == "lost", "it uses the trainer's devices"
        assert server.believed == NOTHING, "work is sent to a server that sleeps"


async def lend_again_and_again(server: LentServer) -> None:
    async with running_lane(server, is_lent=True) as (server.lane, versions):
        for version in range(1, NUM_LOANS + 1):
            await versions.begin(version)
            server.is_wanted = True
            server.lane.set_wanted(True)
            if server.num_requests < server.unwanted_at:
                while server.is_wanted and server.believed != version:
                    server.check_lane()
                    await asyncio.sleep(0)
            else:
                await until_served(server, server.lane, version)
            if server.is_wanted:
                server.cut()
            await until_free(server)


FAULTS = [("refused", 0), ("answered in vain", 0), ("restarted", 0)]
FAULTS += [("late", lag) for lag in (1, 3, 8)]


async def lend_with_all_faults(stops_for: str) -> None:
    server = LentServer(stops_for)
    await lend_again_and_again(server)
    for at in range(1, server.num_requests + 1):
        for fault, lag in FAULTS:
            try:
                await lend_again_and_again(LentServer(stops_for, fault, at, lag))
            except AssertionError as error:
                raise AssertionError(f"{error}: request {at} was {fault} ({lag})") from error
        for is_received in (False, True):
            cut = LentServer(stops_for, unwanted_at=at, is_received=is_received)
            try:
                await lend_again_and_again(cut)
            except AssertionError as error:
                raise AssertionError(f"{error}: it was not wanted at request {at}") from error


@pytest.mark.parametrize("stops_for", ["transfer", "commit", "nothing"])
async def test_whatever_request_fails_or_is_broken_off_a_lent_server_sleeps_or_is_lost(
    stops_for, monkeypatch
):
    monkeypatch.setattr(lane_module, "_CHECK_SECONDS", 0.001)
    await lend_with_all_faults(stops_for)


async def without_waking(lane: Lane) -> None:
    await lane._connection.join()


async def without_asking_the_server(lane: Lane) -> None:
    lane._server.lose()
    lane._take(LaneEvent.ASLEEP)
    lane._listeners.on_asleep(lane.url)


async def without_breaking_off(lane: Lane, serving: Coroutine[Any, Any, None]) -> None:
    await serving


async def without_forgetting_the_weights(lane: Lane) -> None:
    await lane._client.sleep()
    lane._take(LaneEvent.ASLEEP)
    lane._listeners.on_asleep(lane.url)


@pytest.mark.parametrize(
    ("method", "planted", "message"),
    [
        ("_join", without_waking, "the server is stuck"),
        ("_fall_asleep", without_asking_the_server, "the devices are not free"),
        ("_until_unwanted", without_breaking_off, "it does not fall asleep"),
        ("_fall_asleep", without_forgetting_the_weights, "believes what the lane does not"),
    ],
)
async def test_a_lane_that_is_broken_on_purpose_is_found(method, planted, message, monkeypatch):
    monkeypatch.setattr(lane_module, "_CHECK_SECONDS", 0.001)
    monkeypatch.setattr(Lane, method, planted)
    with pytest.raises(AssertionError, match=message):
        await lend_with_all_faults("commit")
