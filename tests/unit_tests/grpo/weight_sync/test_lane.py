# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a lane reports of its server: pushes, attestations, losses, and the bases of deltas."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.client import Capabilities, ServerError
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.weight_sync import lane as lane_module
from torchtitan.grpo.weight_sync.attestation import Attestation, Probes, Tolerances
from torchtitan.grpo.weight_sync.lane import (
    Lane,
    LaneEvent,
    LaneState,
    Listeners,
    WeightsRefused,
    next_state,
)
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.transports.interface import PushReport
from torchtitan.grpo.weight_sync.versions import Versions

PATIENCE = 30.0


class Server:
    """Names the version that was pushed last, unless it is told another; takes deltas."""

    url = "http://a"
    capabilities = Capabilities(stops_for="nothing", takes_deltas=True)

    def __init__(self, logprobs: list[float] | None) -> None:
        self._logprobs = logprobs
        self.served: int | None = None
        self.num_resumed = 0
        self.asked = list[Any]()
        self.sleep_error: Exception | None = None
        self.fault = ""
        self.may_wake = asyncio.Event()
        self.may_wake.set()

    async def meet_fault(self) -> None:
        if self.fault == "stopped":
            await asyncio.sleep(0.02)  # the time limit of a request
        if self.fault:
            raise RouteError(f"it is {self.fault}")

    async def version(self) -> int | None:
        await self.meet_fault()
        return self.served

    async def resume(self) -> None:
        self.num_resumed += 1

    async def sleep(self) -> None:
        await self.meet_fault()
        if self.sleep_error is not None:
            raise self.sleep_error
        self.asked.append("sleep")

    async def close(self) -> None: ...

    async def wake(self) -> None:
        await self.meet_fault()
        await self.may_wake.wait()
        self.asked.append("wake")

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        if self._logprobs is None:
            await asyncio.Event().wait()
        return list(self._logprobs or ())


class Way:
    """Notes what it is asked for; a push ends when the test lets it, or as it is told to."""

    def __init__(self, server: Server) -> None:
        self.client, self.asked = server, server.asked
        self.may_end, self.begun = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None
        self.names: tuple[int | None] | None = None
        self.may_end.set()

    async def join(self) -> None:
        self.asked.append("join")

    async def prepare(self, version: int) -> None: ...

    async def push(self, version: int, base: int | None) -> PushReport:
        self.asked.append((version, base))
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)  # longer than a recovery
            self.asked.append("broken off")
            raise
        await self.client.meet_fault()
        if self.error is not None:
            raise self.error
        self.client.served = version if self.names is None else self.names[0]
        return PushReport(version, 1, 0.1, 0.1, 0.0)

    async def recover(self) -> None:
        await asyncio.sleep(0.005)  # may be broken off
        self.asked.append("recover")

    async def close(self) -> None: ...


class Rig:
    """A lane over a scripted way, and what its listeners heard."""

    def __init__(
        self,
        *,
        delta: bool = False,
        max_alive: int = 4,
        is_initial: bool = False,
        is_lent: bool = False,
        push_timeout_seconds: float = PATIENCE,
        expected: list[float] | None = None,
        served: list[float] | None = None,
        attest_every: int = 0,
    ) -> None:
        self.dropped = list[int]()
        self.fault_in: tuple[LaneState, str] | None = None
        self.server = Server(served)
        self.way = Way(self.server)
        self.versions = Versions(SlotTable(2), max_alive, self._drop)
        self.heard: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        sync = WeightSync(
            push_timeout_seconds=push_timeout_seconds,
            retry_seconds=0.01,
            max_retry_seconds=0.01,
            delta=delta,
        )
        probes, way = Probes(), self.way
        if expected is not None:
            probes.put(4, expected)
        connection: Any = way
        self.lane = Lane(
            connection,
            self.versions,
            sync,
            Attestation(attest_every, [1, 2, 3], probes, Tolerances(1e-3, 1e-3), 0.05),
            Listeners(
                on_change=self._meet_fault,
                on_version=lambda url, version, _: self.heard.put_nowait(("version", version)),
                on_lost=lambda url, reason: self.heard.put_nowait(("lost", reason)),
                on_asleep=lambda url: self.heard.put_nowait(("asleep", url)),
            ),
            is_initial=is_initial,
            is_lent=is_lent,
        )
        self.running = asyncio.create_task(self.lane.run())

    async def _drop(self, version: int) -> None:
        self.dropped.append(version)

    def _meet_fault(self) -> None:
        if self.fault_in is not None and self.lane.state is self.fault_in[0]:
            self.server.fault, self.fault_in = self.fault_in[1], None

    async def hears(self, *but: str) -> tuple[str, Any]:
        """Returns what the listeners hear next, or the next of another kind than ``but``."""
        while (heard := await asyncio.wait_for(self.heard.get(), PATIENCE))[0] in but:
            pass
        return heard

    async def serve(self, *versions: int) -> None:
        for version in versions:
            await self.versions.begin(version)
            assert await self.hears() == ("version", version)

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.wait_for(asyncio.gather(self.running, return_exceptions=True), PATIENCE)
        await self.versions.close()


@contextlib.asynccontextmanager
async def lane_rig(**options: Any) -> AsyncIterator[Rig]:
    rig = Rig(**options)
    yield rig
    await rig.end()


@pytest.mark.parametrize(
    ("expected", "served", "said", "num_attested"),
    [
        ([-1.0, -2.0], [-1.0, -2.0], 4, 1),
        ([-1.0, -2.0], [-1.0, -2.5], ["must equal the trainer's"], 0),
        ([-1.0, -2.0], None, ["http://a must rate the probe", "sync.timeout_seconds = 0.05"], 0),
        (None, [-1.0, -2.0], 4, 0),  # the trainer is late, which costs no server
    ],
)
async def test_a_server_is_lost_that_rates_tokens_otherwise_or_not_in_time(
    expected, served, said, num_attested, caplog
):
    async with lane_rig(expected=expected, served=served, attest_every=2) as rig:
        await rig.versions.begin(4)
        kind, heard = await rig.hears()
        assert rig.lane.num_attested == num_attested
    if said == 4:
        assert (kind, heard, rig.lane.num_failures) == ("version", 4, 0)
    else:
        assert kind == "lost" and all(part in heard for part in said)
    assert ("http://a serves version 4, unattested" in caplog.text) == (expected is None)


async def test_a_lane_reports_the_version_that_was_pushed_though_a_newer_one_has_come():
    async with lane_rig() as rig:
        rig.way.may_end.clear()
        await rig.versions.begin(3)
        await asyncio.wait_for(rig.way.begun.wait(), PATIENCE)
        await rig.versions.begin(4)
        rig.way.may_end.set()
        assert [await rig.hears() for _ in range(2)] == [("version", 3), ("version", 4)]
        assert rig.lane.version == 4
        assert rig.way.asked == ["join", (3, None), (4, None)]


async def test_a_push_that_does_not_end_in_time_is_reported_with_its_setting():
    async with lane_rig(push_timeout_seconds=0.1) as rig:
        rig.way.may_end.clear()
        await rig.versions.begin(3)
        what, reason = await rig.hears()
        assert what == "lost"
        assert "take version 3 within weight_sync.push_timeout_seconds = 0.1," in reason


async def test_a_held_lane_keeps_its_version_until_it_is_released():
    async with lane_rig() as rig:
        rig.lane.held_from = 1
        await rig.serve(1)
        rig.lane.held_from = None
        await asyncio.sleep(3 * lane_module._HELD_SECONDS)  # it waits for the next one by now
        rig.lane.held_from = 1
        await rig.versions.begin(2)
        await asyncio.sleep(5 * lane_module._HELD_SECONDS)
        assert (rig.lane.version, rig.way.asked) == (1, ["join", (1, None)])
        rig.lane.held_from = None
        while (heard := await rig.hears()) == ("version", 1):
            pass  # told again, as by any idle lane
        assert heard == ("version", 2)


async def test_a_lost_server_has_no_version_until_it_has_confirmed_the_newest():
    async with lane_rig() as rig:
        await rig.serve(1)
        rig.way.error = ServerError("it is gone")
        await rig.versions.begin(2)
        assert await rig.hears() == ("lost", "it is gone")
        assert (rig.lane.version, rig.lane.is_lost) == (-1, True)
        rig.way.error = None
        assert await rig.hears("lost") == ("version", 2)
        assert (rig.lane.version, rig.lane.is_lost) == (2, False)
        # It is told of the loss, cleared up after, joined, and sent everything.
        assert rig.way.asked[:2] == ["join", (1, None)]
        assert rig.way.asked[-3:] == ["recover", "join", (2, None)]


async def test_a_lent_server_sleeps_and_wakes_in_its_groups_and_gets_all_weights_again():
    async with lane_rig(is_lent=True, delta=True) as rig:
        await rig.serve(1)
        rig.lane.set_wanted(False)
        assert await rig.hears("version") == ("asleep", "http://a")
        assert (rig.lane.version, rig.lane.is_asleep, rig.lane.is_lost) == (-1, True, False)
        await rig.versions.begin(2)
        await rig.versions.begin(3)
        await asyncio.sleep(0.05)  # enough for a lane that would not wait until it is wanted
        assert rig.way.asked == ["wake", "join", (1, None), "sleep"]
        rig.lane.set_wanted(False)  # for a rollout process that was started again
        assert await rig.hears() == ("asleep", "http://a")
        rig.lane.set_wanted(True)
        assert await rig.hears() == ("version", 3)
        assert rig.way.asked[4:] == ["wake", (3, None)]
        assert rig.dropped == [1, 2]
        rig.lane.set_wanted(False)
        assert await rig.hears("version") == ("asleep", "http://a")
        await rig.end()
        await rig.lane.close()
        assert rig.lane.state is LaneState.CLOSED


@pytest.mark.parametrize("state", [LaneState.JOINING, LaneState.SYNCING, LaneState.LOST])
async def test_what_a_lane_does_is_broken_off_when_its_server_is_to_sleep(state):
    async with lane_rig(is_lent=True) as rig:
        rig.way.may_end.clear()
        if state is not LaneState.JOINING:
            await rig.versions.begin(1)
            await asyncio.wait_for(rig.way.begun.wait(), PATIENCE)
        if state is LaneState.LOST:
            rig.way.error = ServerError("it is busy")
            rig.way.may_end.set()
            assert await rig.hears() == ("lost", "it is busy")
        rig.lane.set_wanted(False)
        assert await rig.hears("lost") == ("asleep", "http://a")
        assert rig.way.asked[-2:] == ["recover", "sleep"]
        if state is LaneState.SYNCING:
            assert rig.way.asked[2:] == [(1, None), "broken off", "recover", "sleep"]
        rig.way.error = None
        rig.way.may_end.set()
        rig.lane.set_wanted(True)
        await rig.serve(2)
        assert rig.way.asked[-3:] == ["wake", "join", (2, None)]


async def test_a_request_to_wake_is_answered_before_the_server_is_put_to_sleep():
    async with lane_rig(is_lent=True) as rig:
        rig.server.may_wake.clear()
        await rig.versions.begin(1)
        await asyncio.sleep(0.02)
        rig.lane.set_wanted(False)
        await asyncio.sleep(0.02)
        assert rig.way.asked == []
        rig.server.may_wake.set()
        assert await rig.hears() == ("asleep", "http://a")
        assert rig.way.asked == ["wake", "recover", "sleep"]


@pytest.mark.parametrize("error", [ServerError("it hangs"), TimeoutError("it hangs")])
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_server_that_does_not_fall_asleep_is_lost_until_it_is_wanted(is_lost, error):
    async with lane_rig(is_lent=True) as rig:
        await rig.serve(1)
        rig.server.sleep_error = error
        if is_lost:
            rig.way.error = ServerError("it is busy")
            await rig.versions.begin(2)
            assert await rig.hears("version") == ("lost", "it is busy")
        rig.lane.set_wanted(False)
        while (heard := await rig.hears("version")) != ("lost", "it hangs"):
            assert heard == ("lost", "it is busy")
        rig.way.error = None
        if not is_lost:
            await rig.versions.begin(2)
        await asyncio.sleep(0.05)  # several times the pause before it would be tried again
        assert (rig.lane.state, rig.way.asked[-1]) == (LaneState.LOST, "recover")
        rig.lane.set_wanted(True)
        assert await rig.hears() == ("version", 2)
        assert rig.way.asked[-3:] == ["wake", "join", (2, None)]


@pytest.mark.parametrize("is_needed", [False, True])
@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize("state", [state for state in LaneState if state is not LaneState.CLOSED])
async def test_a_fault_in_any_state_is_told_as_a_loss_and_the_server_serves_when_it_is_back(
    state, fault, is_needed, monkeypatch
):
    """If its devices ``are needed`` meanwhile, it is never said to sleep."""
    monkeypatch.setattr(lane_module, "_CHECK_SECONDS", 0.02)
    async with lane_rig(is_lent=True) as rig:
        await rig.serve(1)
        rig.fault_in = (state, fault)
        if state in (LaneState.JOINING, LaneState.ASLEEP):
            rig.lane.set_wanted(False)
            assert await rig.hears("version") == ("asleep", "http://a")
            rig.lane.set_wanted(True)
        rig.way.error = ServerError("a push failed") if state is LaneState.LOST else None
        await rig.versions.begin(2)
        while (heard := await rig.hears("version")) != ("lost", f"it is {fault}"):
            assert heard == ("lost", "a push failed")
            rig.way.error = None
        if is_needed:
            rig.lane.set_wanted(False)
            while rig.lane.state is not LaneState.LOST or rig.way.asked[-1] != "recover":
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)  # the request to sleep has failed
            while not rig.heard.empty():
                assert rig.heard.get_nowait()[0] == "lost"
            assert (rig.lane.state, rig.lane.version) == (LaneState.LOST, -1)
        rig.server.fault = ""
        rig.lane.set_wanted(True)
        assert await rig.hears("lost") == ("version", 2)
        assert rig.way.asked[-2:] == ["join", (2, None)]


@pytest.mark.parametrize("named", [3, 5, None])
async def test_a_server_that_names_another_version_than_the_pushed_one_is_lost(named):
    async with lane_rig() as rig:
        rig.way.names = (named,)
        await rig.versions.begin(4)
        kind, reason = await rig.hears()
        assert kind == "lost"
        assert f"must serve version 4, but it reports {named}" in reason
        assert rig.lane.num_pushes == 0


async def test_a_delta_is_against_what_the_server_has_confirmed_and_that_is_kept_meanwhile():
    async with lane_rig(delta=True, max_alive=2) as rig:
        await rig.serve(1, 2)
        rig.way.begun.clear()
        rig.way.may_end.clear()
        await rig.versions.begin(3)
        await asyncio.wait_for(rig.way.begun.wait(), PATIENCE)
        # The newest, and the base of the push under way: neither may go for a third.
        assert not await rig.versions.room(0.01)
        assert rig.dropped == [1]
        rig.way.may_end.set()
        assert await rig.hears() == ("version", 3)
        assert rig.way.asked == ["join", (1, None), (2, 1), (3, 2)]


async def test_a_server_that_refuses_the_first_weights_again_and_again_ends_the_run():
    async with lane_rig(is_initial=True) as rig:
        rig.way.error = RouteError("/update_weights answered 400: no parameter named x", 400)
        await rig.versions.begin(1)
        with pytest.raises(WeightsRefused, match=r"http://a .*never taken any.* no parameter"):
            await asyncio.wait_for(asyncio.shield(rig.running), PATIENCE)
        assert rig.lane.num_failures == 3


@pytest.mark.parametrize(
    ("error", "is_initial", "taken"),
    [
        (RouteError("no connection"), True, []),
        (RuntimeError("the group broke"), True, []),
        (RouteError("answered 400", 400), False, []),
        (RouteError("answered 400", 400), True, [1]),
    ],
)
async def test_no_other_loss_of_a_server_ends_the_run(error, is_initial, taken):
    async with lane_rig(is_initial=is_initial) as rig:
        await rig.serve(*taken)
        rig.way.error = error
        await rig.versions.begin(2)
        for _ in range(5):
            assert (await rig.hears())[0] == "lost"
        assert not rig.running.done()


async def test_a_loss_is_told_once_for_each_reason_and_ends_with_a_line_of_its_own(caplog):
    caplog.set_level(logging.WARNING)
    async with lane_rig() as rig:
        await rig.serve(1)
        rig.way.error = RouteError("no connection")
        await rig.versions.begin(2)
        for _ in range(4):
            assert (await rig.hears())[0] == "lost"
        rig.way.error = RouteError("another model")
        while await rig.hears() != ("lost", "another model"):
            pass
        rig.way.error = None
        await rig.hears("lost")
    lost, other, joined = [record.getMessage() for record in caplog.records]
    assert lost == "Lost http://a while syncing: no connection The trainer tries again in 0.01 s."
    again = r"http://a has not joined again for \d+ s: another model The trainer tries again in"
    assert re.match(again, other)
    assert re.fullmatch(r"http://a has joined again, \d+ s after it was lost\.", joined)


def test_nothing_leads_to_ready_but_attestation_and_nothing_out_of_closed():
    ready = [way for way, state in lane_module._NEXT.items() if state is LaneState.READY]
    assert ready == [(LaneState.ATTESTING, LaneEvent.ATTESTED)]
    assert not any(state is LaneState.CLOSED for state, _ in lane_module._NEXT)
    with pytest.raises(
        ValueError, match=r"syncing can take \['asleep', 'committed', 'failed', 'removed'\]"
    ):
        next_state(LaneState.SYNCING, LaneEvent.ATTESTED)
