# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""When lent servers are woken and put to sleep, and that a batch waits until they sleep."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from rollouts import group, rollout
from stub_clients import StubClient

from torchtitan.grpo.config import GRPO, Rollout
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.lending import lender
from torchtitan.grpo.rollout.lending.lender import DeviceRequests, Lender
from torchtitan.grpo.rollout.lending.scheduler import Decision, LendScheduler, Lent, Moment
from torchtitan.grpo.rollout.link_messages import DevicesWanted
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher

SECONDS = 30
LENT, SECOND, OTHER = "http://lent", "http://second", "http://other"


class Idle(StubClient):
    def __init__(self, url: str) -> None:
        self.url = url

    async def abort(self, request_id: str | None) -> None: ...


class Lanes:
    """Rank 0's lanes and the fleet: lent servers do as they are told, unless they ``hang``."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.lent, self.done = [LENT], list[str]()
        self.hang, self.refuse, self.was_up = False, False, True
        self.version = 0
        self._dispatcher = dispatcher
        self.lender: Lender

    async def set_wanted(self, is_wanted: bool) -> None:
        self.done.append("wake" if is_wanted else "sleep")
        if is_wanted and not self.hang:
            self._dispatcher.set_running(LENT)
            self.lender.note_version(LENT, self.version)
        elif self.refuse:
            self._dispatcher.set_lost(LENT, "it does not sleep")
            self.lender.note_lost(LENT, "it does not sleep.")
        elif not self.hang:
            self.lender.note_asleep(LENT)

    def is_up(self, url: str) -> bool:
        return self.was_up

    async def end(self, url: str) -> bool:
        self.done.append("end")
        self._dispatcher.set_down(url, "it was ended")
        was_up, self.was_up = self.was_up, False
        return was_up


class Scripted(LendScheduler):
    """Decides as the test says while a batch is not full."""

    def __init__(self) -> None:
        super().__init__(0.05)
        self.next = Decision.STAY
        self.moment: Moment | None = None
        self.observed = list[tuple[Any, ...]]()

    def observe_room(self, seconds: float) -> None:
        self.observed.append(("room", seconds))

    def observe_wake(self, seconds: float) -> None:
        self.observed.append(("wake", seconds))

    def observe_sleep(self, seconds: float) -> None:
        self.observed.append(("sleep", seconds))

    def observe_step(self, *observed: float | None) -> None:
        self.observed.append(("step", *observed))

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.observed]

    def decide(self, moment: Moment) -> Decision:
        self.moment = moment
        if moment.is_full and moment.lent in (Lent.WAKING, Lent.AWAKE):
            return Decision.TAKE_BACK
        allowed = (Decision.LEND, Lent.NO), (Decision.TAKE_BACK, Lent.AWAKE)
        return self.next if (self.next, moment.lent) in allowed else Decision.STAY


class World:
    """``rank_zero`` is what it was asked for; it makes room when the test calls ``devices.free``."""

    def __init__(self, num_others: int, sleep_seconds: float) -> None:
        clients = [Idle(LENT), *(Idle(OTHER) for _ in range(num_others))]
        self.dispatcher = Dispatcher(clients, Rollout(), vocab_size=8)
        self.lanes = Lanes(self.dispatcher)
        self.asked: asyncio.Queue[DevicesWanted] = asyncio.Queue()
        self.devices = DeviceRequests(self.asked.put, 0)
        self.scheduler = Scripted()
        self.admission = Admission(GRPO(prompts_per_step=2), Rollout(), 0)
        self.generating = set[int]()
        self.lender = self.lanes.lender = Lender(
            self.scheduler, self.admission, self.dispatcher, self.lanes, self.devices,
            lambda: self.generating,
            sleep_seconds=sleep_seconds,
        )  # fmt: skip

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(SECONDS):
            while not holds():
                await asyncio.sleep(0.001)

    async def deliver(self, version: int) -> dict[str, float]:
        groups = [group(version, rollout(4))]
        return await asyncio.wait_for(self.lender.give_back(groups), SECONDS)

    @property
    def state(self) -> Lent:
        return self.lender.lent


@contextlib.asynccontextmanager
async def started(num_others: int = 0, sleep_seconds: float = SECONDS) -> AsyncIterator[World]:
    """Servers are launched, rank 0 has made room, and the first version is pushed."""
    world = World(num_others, sleep_seconds)
    running = asyncio.create_task(world.lender.run())
    world.devices.free(0)
    for url in world.dispatcher.servers:
        world.dispatcher.set_version(url, 0)
    await world.until(lambda: world.state is Lent.AWAKE)
    yield world
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_servers_serve_until_a_batch_is_full_and_again_after_the_last_step():
    async with started() as world:
        world.lender.ask(0)
        metrics = await world.deliver(0)
        assert world.lanes.done == ["sleep"] and world.state is Lent.NO
        assert world.dispatcher.servers[LENT].state == "asleep"
        assert metrics["lend/late_seconds"] >= metrics["lend/sleep_seconds"] > 0
        assert metrics["lend/lent_seconds"] > 0
        await asyncio.sleep(0.2)  # while the trainer trains
        assert world.lanes.done == ["sleep"]
        world.lender.note_version(LENT, 0)  # attested just before it was to sleep
        assert world.dispatcher.servers[LENT].version is None
        world.lanes.version = 1
        world.devices.free(1)  # no batch is wanted
        await world.until(lambda: world.state is Lent.AWAKE)
        assert world.lanes.done == ["sleep", "wake"]
        assert world.dispatcher.servers[LENT].version == 1


async def test_servers_are_woken_as_soon_as_the_devices_are_free(monkeypatch):
    monkeypatch.setattr(lender, "_LOOK_SECONDS", 2.0 * SECONDS)
    async with started() as world:
        world.lender.ask(0)
        await world.deliver(0)
        world.scheduler.next = Decision.LEND
        world.lender.ask(1)
        assert await asyncio.wait_for(world.asked.get(), SECONDS) == DevicesWanted(1)
        world.devices.free(1)
        await world.until(lambda: world.state is Lent.AWAKE)


async def test_rank_zero_is_asked_for_devices_and_servers_are_woken_once_they_are_free():
    async with started(num_others=1) as world:
        world.lender.ask(0)
        await world.deliver(0)
        world.scheduler.next = Decision.LEND
        await asyncio.sleep(0.2)
        assert world.asked.empty(), "the trainer trains"
        world.lender.ask(1)
        assert await asyncio.wait_for(world.asked.get(), SECONDS) == DevicesWanted(1)
        await asyncio.sleep(0.2)
        assert (world.state, world.lanes.done) == (Lent.WAKING, ["sleep"])
        world.devices.free(1)
        await world.until(lambda: world.state is Lent.AWAKE)
        world.scheduler.next = Decision.TAKE_BACK
        await world.until(lambda: world.state is Lent.NO)
        assert world.lanes.done == ["sleep", "wake", "sleep"]
        world.scheduler.next = Decision.STAY
        metrics = await world.deliver(1)
        assert (metrics["lend/wakes"], metrics["lend/kills"]) == (1, 0)
        assert metrics["lend/wake_seconds"] > 0
        assert world.lanes.done == ["sleep", "wake", "sleep"]
        (_, room), *_ = (one for one in world.scheduler.observed if one[0] == "room")
        names = ["sleep", "step", "room", "wake", "sleep", "step"]
        assert room >= 0.2 and world.scheduler.names == names, "the start is no wake-up"


async def test_a_batch_that_is_full_before_the_devices_are_free_wakes_nobody():
    async with started(num_others=1) as world:
        world.lender.ask(0)
        await world.deliver(0)
        world.scheduler.next = Decision.LEND
        world.lender.ask(1)
        await asyncio.wait_for(world.asked.get(), SECONDS)
        await world.deliver(1)
        world.devices.free(1)  # overtaken by the batch
        await asyncio.sleep(0.2)
        assert (world.state, world.lanes.done) == (Lent.NO, ["sleep"])


async def test_servers_that_still_wake_are_put_to_sleep_when_the_batch_is_full():
    async with started(num_others=1) as world:
        world.lender.ask(0)
        await world.deliver(0)
        world.scheduler.next = Decision.LEND
        world.lender.ask(1)
        await asyncio.wait_for(world.asked.get(), SECONDS)
        world.lanes.hang = True
        world.devices.free(1)
        await world.until(lambda: world.lanes.done[-1] == "wake")
        world.lanes.hang = False
        await world.deliver(1)
        assert world.lanes.done == ["sleep", "wake", "sleep"]
        assert world.scheduler.names == ["sleep", "step", "room", "wake", "step"]


async def test_the_scheduler_is_told_what_is_missing_and_how_long_a_step_took():
    async with started(num_others=1) as world:
        lent, other = world.dispatcher.servers.values()
        lent.begin_job(8.0, 1)
        world.generating = {1, 2}
        for group_id in world.generating:
            world.admission.start(group_id, -world.admission.max_staleness)  # due now
        for group_id, is_evaluation in ((2, False), (2, False), (None, True)):
            other.begin_job(8.0, group_id, is_evaluation=is_evaluation)
        before = time.monotonic()
        world.lender.ask(0)
        after = time.monotonic()
        await world.until(lambda: world.scheduler.moment is not None)
        moment = world.scheduler.moment
        assert moment is not None and moment.asked_at is not None
        assert before <= moment.asked_at <= after
        assert (moment.missing_groups, moment.movable_groups) == (2, 1)
        lent.num_tokens, other.num_tokens = 8, 24
        await asyncio.sleep(0.3)
        full_at = time.monotonic()
        assert (await world.deliver(0))["lend/tokens_fraction"] == 0.25
        delivered_at = time.monotonic()
        assert world.scheduler.moment is not None and world.scheduler.moment.is_full
        world.lender.ask(1)
        await world.deliver(1)
        moment = world.scheduler.moment
        assert moment.lent_rate and moment.other_rate and moment.lent_rate < moment.other_rate
        first, second = (one[1:] for one in world.scheduler.observed if one[0] == "step")
        assert first[0] > 0.3 and second[0] < time.monotonic() - full_at
        assert first[1] <= delivered_at - full_at, "late from when the batch is full"
        assert (first[2], second[2]) == (2.0, 0.0), "groups of four tokens"


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_server_that_does_not_fall_asleep_is_ended_and_the_batch_is_sent(refuses, caplog):
    limit = SECONDS if refuses else 0.05
    async with started(sleep_seconds=limit) as world:
        world.lender.ask(0)
        world.lanes.hang, world.lanes.refuse = True, refuses
        metrics = await world.deliver(0)
        assert world.lanes.done == ["sleep", "end"]
        assert metrics["lend/kills"] == 1
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    late = "not within inference.sleep_timeout_seconds = 0.05."
    assert (
        f"{LENT} was ended, because" in line and ("it does not sleep." if refuses else late) in line
    )


async def test_a_server_whose_start_is_broken_off_is_not_counted_as_one_that_did_not_sleep(caplog):
    async with started() as world:
        world.lender.ask(0)
        world.lanes.refuse, world.lanes.was_up = True, False
        assert (await world.deliver(0))["lend/kills"] == 0
        assert world.lanes.done == ["sleep", "end"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_lent_servers_are_awake_once_one_is_ready_and_the_others_have_ended():
    async with started() as world:
        world.lanes.lent.append(SECOND)
        world.dispatcher.add(Idle(SECOND))
        world.lender.ask(0)
        world.dispatcher.set_down(SECOND, "killed")
        await world.deliver(0)
        world.lanes.hang = True
        world.devices.free(1)
        await world.until(lambda: world.state is Lent.WAKING)
        world.dispatcher.set_down(LENT, "killed as well")
        await asyncio.sleep(0.2)
        assert world.state is Lent.WAKING, "they are started again"
        for url in (LENT, SECOND):
            world.dispatcher.set_running(url)
        world.dispatcher.set_version(LENT, 0)
        await asyncio.sleep(0.2)
        assert world.state is Lent.WAKING, "the second one may still come"
        world.dispatcher.set_down(SECOND, "killed again")
        await world.until(lambda: world.state is Lent.AWAKE)


async def test_a_server_that_has_ended_is_not_waited_for():
    async with started() as world:
        world.lender.ask(0)
        world.lanes.hang = True
        world.dispatcher.set_down(LENT, "killed")
        metrics = await world.deliver(0)
        assert (world.lanes.done, metrics["lend/kills"]) == (["sleep"], 0)


async def test_late_news_of_sleep_do_not_count_for_a_server_that_was_woken_since():
    async with started() as world:
        world.lender.ask(0)
        await world.deliver(0)
        world.lender.ask(1)
        world.scheduler.next = Decision.LEND
        await asyncio.wait_for(world.asked.get(), SECONDS)
        world.devices.free(1)
        await world.until(lambda: world.state is Lent.AWAKE)
        world.lender.note_asleep(LENT)
        assert world.dispatcher.servers[LENT].state == "ready"
        world.lanes.hang = True
        delivered = asyncio.create_task(world.deliver(1))
        await asyncio.sleep(0.2)
        assert not delivered.done(), "the server still has the devices"
        world.lender.note_asleep(LENT)
        await asyncio.wait_for(delivered, SECONDS)


async def test_a_lost_server_is_replaced_while_it_is_wanted_unless_it_comes_back_or_starts():
    async with started(sleep_seconds=0.2) as world:
        await world.until(lambda: world.state is Lent.AWAKE)

        def lose() -> None:
            world.dispatcher.set_lost(LENT, "it hangs")
            world.lender.note_lost(LENT, "it hangs")

        lose()
        await asyncio.sleep(0.05)
        world.lender.note_version(LENT, 0)
        await asyncio.sleep(0.4)
        assert world.lanes.done == []
        world.lanes.was_up = False  # it starts
        lose()
        await asyncio.sleep(0.4)
        assert world.lanes.done == []
        world.lanes.was_up = True
        await asyncio.sleep(0.4)
        assert world.lanes.done == [], "its weights are pushed"
        lose()
        await world.until(lambda: world.lanes.done == ["end"])
