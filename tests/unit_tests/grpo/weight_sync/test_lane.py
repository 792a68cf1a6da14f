# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a lane reports of its server: pushes, attestations, losses, and the bases of deltas."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from torchtitan.grpo.attestation import Attestation, Probes, Tolerances
from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.weight_sync import lane as lane_module
from torchtitan.grpo.weight_sync.lane import Lane, Listeners, WeightsRefused
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.transports.interface import PushReport
from torchtitan.grpo.weight_sync.versions import Versions

VERSION = 4
FIXED = Tolerances(1e-3, 1e-3)
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
        return PushReport(version, 1, 0.1, 0.1, 0.0)

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
        attestation = Attestation(2, [1, 2, 3], probes, FIXED, timeout_seconds=0.05)
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


class Scripted(Server):
    """Names the version that was pushed last, unless it is told another; takes deltas."""

    takes_deltas = True

    def __init__(self) -> None:
        super().__init__([-1.0])
        self.served: int | None = None
        self.num_resumed = 0

    async def version(self) -> int:
        return self.served if self.served is not None else -1

    async def resume(self) -> None:
        self.num_resumed += 1


class ScriptedWay:
    """Notes what it is asked for; a push ends when the test lets it, or as it is told to."""

    def __init__(self, server: Scripted) -> None:
        self.client, self.asked = server, list[Any]()
        self.may_end, self.begun = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None
        self.may_end.set()

    async def join(self) -> None:
        self.asked.append("join")

    async def prepare(self, version: int) -> None: ...

    async def push(self, version: int, base: int | None) -> PushReport:
        self.asked.append((version, base))
        self.begun.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        self.client.served = version
        return PushReport(version, 1, 0.1, 0.1, 0.0)

    async def recover(self) -> None:
        self.asked.append("recover")


class LaneRig:
    """A lane over a scripted way, and what its listeners heard."""

    def __init__(
        self,
        delta: bool = False,
        max_alive: int = 4,
        is_initial: bool = False,
        push_timeout_seconds: float = PATIENCE,
    ) -> None:
        self.dropped, self.may_drop = list[int](), asyncio.Event()
        self.may_drop.set()
        self.server = Scripted()
        self.way = ScriptedWay(self.server)
        self.versions = Versions(SlotTable(2), max_alive, self._drop)
        self.heard: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        sync = WeightSync(
            push_timeout_seconds=push_timeout_seconds,
            retry_seconds=0.01,
            max_retry_seconds=0.01,
            delta=delta,
        )
        way: Any = self.way
        self.lane = Lane(
            way,
            self.versions,
            sync,
            Attestation(0, [1, 2], Probes(), FIXED, PATIENCE),
            Listeners(
                on_change=lambda: None,
                on_version=lambda url, version: self.heard.put_nowait(("version", version)),
                on_lost=lambda url, reason: self.heard.put_nowait(("lost", reason)),
            ),
            is_initial=is_initial,
        )
        self.running = asyncio.create_task(self.lane.run())

    async def _drop(self, version: int) -> None:
        self.dropped.append(version)
        await self.may_drop.wait()

    async def hears(self) -> tuple[str, Any]:
        return await asyncio.wait_for(self.heard.get(), PATIENCE)

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.versions.close()


def run_rig(body: Callable[[LaneRig], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def bounded() -> None:
        rig = LaneRig(**options)
        await body(rig)
        await rig.end()

    asyncio.run(asyncio.wait_for(bounded(), 4 * PATIENCE))


def test_a_lane_reports_the_version_that_was_pushed_though_a_newer_one_has_come():
    async def body(rig: LaneRig) -> None:
        rig.way.may_end.clear()
        await rig.versions.begin(3)
        await asyncio.wait_for(rig.way.begun.wait(), PATIENCE)
        await rig.versions.begin(4)
        rig.way.may_end.set()
        assert await rig.hears() == ("version", 3)
        # The next one is the newest, and not the one after it.
        assert await rig.hears() == ("version", 4)
        assert rig.lane.version == 4
        assert rig.way.asked == ["join", (3, None), (4, None)]

    run_rig(body)


def test_a_push_that_does_not_end_in_time_is_reported_with_its_setting():
    async def body(rig: LaneRig) -> None:
        rig.way.may_end.clear()
        await rig.versions.begin(3)
        what, reason = await rig.hears()
        assert what == "lost"
        assert (
            "http://a must take version 3 within weight_sync.push_timeout_seconds = 0.1," in reason
        )

    run_rig(body, push_timeout_seconds=0.1)


def test_a_held_lane_keeps_its_version_until_it_is_released():
    async def body(rig: LaneRig) -> None:
        rig.lane.held_from = 2
        await rig.versions.begin(1)
        assert await rig.hears() == ("version", 1)
        await rig.versions.begin(2)
        assert await rig.hears() == ("version", 2)
        await rig.versions.begin(3)
        await asyncio.sleep(10 * lane_module._HELD_SECONDS)
        assert (rig.lane.version, rig.heard.empty()) == (2, True)
        rig.lane.held_from = None
        while (heard := await rig.hears()) == ("version", 2):
            pass  # told again, as by any idle lane
        assert heard == ("version", 3)
        assert rig.way.asked == ["join", (1, None), (2, None), (3, None)]

    run_rig(body)


def test_a_lane_that_waits_for_a_version_when_it_is_held_does_not_take_it():
    async def body(rig: LaneRig) -> None:
        await rig.versions.begin(2)
        assert await rig.hears() == ("version", 2)
        await asyncio.sleep(lane_module._HELD_SECONDS)  # it waits for the next one by now
        rig.lane.held_from = 2
        await rig.versions.begin(3)
        await asyncio.sleep(5 * lane_module._HELD_SECONDS)
        assert rig.lane.version == 2

    run_rig(body)


def test_a_lost_server_has_no_version_until_it_has_confirmed_the_newest():
    async def body(rig: LaneRig) -> None:
        await rig.versions.begin(1)
        assert await rig.hears() == ("version", 1)
        rig.way.error = ServerError("it is gone")
        await rig.versions.begin(2)
        assert await rig.hears() == ("lost", "it is gone")
        assert (rig.lane.version, rig.lane.is_lost) == (-1, True)
        rig.way.error = None
        while (heard := await rig.hears())[0] == "lost":
            pass
        assert heard == ("version", 2)
        assert (rig.lane.version, rig.lane.is_lost) == (2, False)
        # It is told of the loss, cleared up after, joined, and sent everything.
        assert rig.way.asked[:2] == ["join", (1, None)]
        assert rig.way.asked[-3:] == ["recover", "join", (2, None)]

    run_rig(body)


@pytest.mark.parametrize("named", [3, 5, None])
def test_a_server_that_names_another_version_than_the_pushed_one_is_lost(named):
    async def body(rig: LaneRig) -> None:
        async def version() -> int | None:
            return named

        rig.server.version = version  # pyright: ignore[reportAttributeAccessIssue]
        await rig.versions.begin(4)
        kind, reason = await rig.hears()
        assert kind == "lost"
        assert f"must serve version 4, but it reports {named}" in reason
        assert rig.lane.num_pushes == 0

    run_rig(body)


def test_an_idle_server_is_resumed_and_must_still_name_its_version(monkeypatch):
    monkeypatch.setattr(lane_module, "_CHECK_SECONDS", 0.01)

    async def body(rig: LaneRig) -> None:
        rig.server.stops_for = "commit"
        await rig.versions.begin(1)
        # Once when it is pushed, and again when it is found to serve the same.
        assert [await rig.hears() for _ in range(2)] == [("version", 1)] * 2
        assert rig.server.num_resumed > 0
        rig.server.served = 0  # restarted
        while (heard := await rig.hears())[0] == "version":
            pass
        assert "must serve version 1, but it reports 0" in heard[1]

    run_rig(body)


def test_a_delta_is_against_what_the_server_has_confirmed_and_that_is_kept_meanwhile():
    async def body(rig: LaneRig) -> None:
        for version in (1, 2):
            await rig.versions.begin(version)
            assert await rig.hears() == ("version", version)
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

    run_rig(body, delta=True, max_alive=2)


def test_a_server_that_refuses_the_first_weights_again_and_again_ends_the_run():
    async def body(rig: LaneRig) -> None:
        rig.way.error = RouteError("/update_weights answered 400: no parameter named x", 400)
        await rig.versions.begin(1)
        with pytest.raises(
            WeightsRefused, match=r"http://a .*never taken any.* no parameter named"
        ):
            await asyncio.wait_for(asyncio.shield(rig.running), PATIENCE)
        assert rig.lane.num_failures == 3

    run_rig(body, is_initial=True)


@pytest.mark.parametrize(
    ("error", "is_initial"),
    [
        (RouteError("no connection"), True),
        (RuntimeError("the group broke"), True),
        (RouteError("answered 400", 400), False),
    ],
)
def test_no_other_loss_of_a_server_ends_the_run(error: Exception, is_initial: bool):
    async def body(rig: LaneRig) -> None:
        rig.way.error = error
        await rig.versions.begin(1)
        for _ in range(5):
            assert (await rig.hears())[0] == "lost"
        assert not rig.running.done()

    run_rig(body, is_initial=is_initial)


def test_a_server_that_has_taken_weights_before_may_refuse_them_later():
    async def body(rig: LaneRig) -> None:
        await rig.versions.begin(1)
        assert await rig.hears() == ("version", 1)
        rig.way.error = RouteError("answered 400", 400)
        await rig.versions.begin(2)
        for _ in range(5):
            assert (await rig.hears())[0] == "lost"
        assert not rig.running.done()

    run_rig(body, is_initial=True)


def test_a_loss_is_told_once_for_each_reason_and_ends_with_a_line_of_its_own(caplog):
    async def body(rig: LaneRig) -> None:
        await rig.versions.begin(1)
        assert await rig.hears() == ("version", 1)
        rig.way.error = RouteError("no connection")
        await rig.versions.begin(2)
        for _ in range(4):
            assert (await rig.hears())[0] == "lost"
        rig.way.error = RouteError("another model")
        while await rig.hears() != ("lost", "another model"):
            pass
        rig.way.error = None
        while (await rig.hears())[0] == "lost":
            pass

    with caplog.at_level(logging.WARNING):
        run_rig(body)
    lost, other, joined = [record.getMessage() for record in caplog.records]
    assert lost == "Lost http://a while syncing: no connection The trainer tries again in 0.01 s."
    assert other.startswith(
        "http://a has not joined again for 0 s: another model The trainer tries again every"
    )
    assert joined == "http://a has joined again, 0 s after it was lost."
