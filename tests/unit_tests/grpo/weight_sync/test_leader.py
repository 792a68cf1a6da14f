# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""When the leader has ranks copy and gather, and which server stays behind for an evaluation."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.grpo.config import WeightSync
from torchtitan.grpo.inference.client import Capabilities
from torchtitan.grpo.types import ServerInfo
from torchtitan.grpo.weight_sync import leader as module
from torchtitan.grpo.weight_sync.attestation import Attestation, Probes, Tolerances
from torchtitan.grpo.weight_sync.lane import Listeners
from torchtitan.grpo.weight_sync.leader import Leader, LeaderParts, Pin
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.transports.interface import PushReport

SECONDS = 30


class Rank:
    """An agent that has copied its shards when the test says so."""

    def __init__(self, rank: int, calls: list[tuple[int, str, int]]) -> None:
        self.rank, self._calls = rank, calls
        self.asked, self.copied = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def wait_copied(self, slot: int, version: int) -> None:
        self.asked.set()
        await self.copied.wait()
        if self.error is not None:
            raise self.error
        self._calls.append((self.rank, "copied", version))

    async def gather(self, slot: int, version: int, is_held: bool) -> None:
        self._calls.append((self.rank, "gather, held" if is_held else "gather", version))

    async def drop(self, version: int) -> None:
        self._calls.append((self.rank, "drop", version))


class NoTransport(Any):
    """Keeps nothing of a version."""

    async def lead(self, senders: object) -> None: ...

    async def forget(self, version: int) -> None: ...

    def connect(self, client: Any) -> Any:
        return client


class Way:
    """Notes what the server is asked for; see `Connection`."""

    def __init__(self, url: str, calls: asyncio.Queue[tuple[str, str]]) -> None:
        self.url, self.client, self._calls = url, self, calls
        self.capabilities = Capabilities(stops_for="nothing", takes_deltas=False)
        self._version = -1

    async def sleep(self) -> None:
        self._calls.put_nowait((self.url, "sleep"))

    async def wake(self) -> None:
        self._calls.put_nowait((self.url, "wake"))

    async def push(self, version: int, base: int | None) -> PushReport:
        self._version = version
        return PushReport(version, 1, 0.1, 0.1, 0.0)

    async def version(self) -> int:
        return self._version

    async def join(self) -> None: ...

    async def prepare(self, version: int) -> None: ...

    async def recover(self) -> None: ...

    async def close(self) -> None: ...


class Rig:
    """A leader, without servers at first, and two ranks; slot 0 holds version 7.

    ``told`` are lists of servers, or an error, that the leader is told next.
    """

    def __init__(self, max_held: int = 0, num_sources: int = 0) -> None:
        self.told: list[list[ServerInfo] | Exception] = []
        self.asked: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.calls: list[tuple[int, str, int]] = []
        self.ranks: list[Any] = [Rank(rank, self.calls) for rank in range(2)]
        self.slots = SlotTable(2, max_held)
        self.slots.filled(self.slots.reserve(), 7)
        self.ending = False
        parts = LeaderParts(
            self.ranks, self.ranks[:num_sources], [], [], NoTransport(),
            lambda server: Way(server.url, self.asked),  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        listeners = Listeners(lambda: None, lambda *_: None, lambda *_: None, print)
        attestation = Attestation(0, [], Probes(), Tolerances(1.0, 1.0), 1.0)
        self.leader = Leader(
            self.slots, parts, WeightSync(), attestation, listeners, [], self.changed
        )
        self.running = asyncio.create_task(self.leader.run(lambda: self.ending))

    def changed(self) -> list[ServerInfo] | None:
        told = self.told.pop(0) if self.told else None
        if isinstance(told, Exception):
            raise told
        return told

    async def hears(self) -> tuple[str, str]:
        return await asyncio.wait_for(self.asked.get(), SECONDS)

    async def end(self) -> None:
        self.ending = True
        await asyncio.wait_for(self.running, SECONDS)


async def test_no_rank_gathers_and_no_server_gets_a_version_before_all_ranks_have_copied_it():
    rig = Rig()
    first, second = rig.ranks
    first.copied.set()
    await asyncio.wait_for(second.asked.wait(), SECONDS)
    newer = asyncio.create_task(rig.leader.versions.newer_than(-1, SECONDS))
    # Time for whatever might go on without the second rank.
    await asyncio.wait({newer}, timeout=0.1)
    assert not newer.done()
    assert rig.calls == [(0, "copied", 7)]
    second.copied.set()
    assert await newer == 7
    await rig.end()
    assert rig.calls[1:] == [(1, "copied", 7), (0, "gather", 7), (1, "gather", 7)]
    # Both slots can be had again.
    assert {rig.slots.reserve(), rig.slots.reserve()} == {0, 1}


async def test_a_slot_that_is_sent_from_is_free_again_once_its_version_is_dropped():
    rig = Rig(max_held=1, num_sources=1)
    for rank in rig.ranks:
        rank.copied.set()
    await wait_until(lambda: not rig.slots.can_hold())
    # 7 is held and still the newest, so 8 is copied out of its slot.
    rig.slots.filled(rig.slots.reserve(), 8)
    rig.slots.wake()
    await wait_until(rig.slots.can_hold)
    dropped = (0, "drop", 7)
    assert dropped in rig.calls and (1, "drop", 7) not in rig.calls
    rig.slots.filled(rig.slots.reserve(), 9)
    rig.slots.wake()
    await wait_until(lambda: not rig.slots.can_hold())
    await rig.end()
    gathered = [call for call in rig.calls if call[0] == 0 and "gather" in call[1]]
    assert gathered == [(0, "gather, held", 7), (0, "gather", 8), (0, "gather, held", 9)]
    # All but the one that is held can be had.
    assert len({rig.slots.reserve(), rig.slots.reserve()}) == 2


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_copy_that_fails_ends_the_leader_before_anything_is_gathered():
    rig = Rig()
    rig.ranks[1].error = TimeoutError("Rank 1 must have published version 7")
    rig.ranks[1].copied.set()
    with pytest.raises(TimeoutError, match="must have published version 7"):
        await asyncio.wait_for(rig.running, SECONDS)
    assert not rig.calls
    assert rig.leader.versions.num_alive == 0


async def test_lent_servers_are_told_at_once_whether_to_serve_or_to_sleep():
    rig = Rig()
    for rank in rig.ranks:
        rank.copied.set()
    a, b = (ServerInfo(f"http://{name}", "vllm", is_lent=True) for name in "ab")
    rig.told.append([a])
    assert await rig.hears() == (a.url, "wake")
    await wait_until(lambda: rig.leader.lanes[0].version == 7)
    rig.ranks[1].copied.clear()
    rig.slots.filled(rig.slots.reserve(), 8)
    rig.slots.wake()
    # A rank copies late, and so version 8 is not gathered in what follows.
    b_asleep = replace(b, is_wanted=False)
    rig.told.append([replace(a, is_wanted=False)])
    assert await rig.hears() == (a.url, "sleep")
    rig.told.append([a, b_asleep])
    assert {await rig.hears(), await rig.hears()} == {(a.url, "wake"), (b.url, "sleep")}
    rig.told.append(ValueError("an error of ours"))
    rig.ranks[1].copied.set()
    with pytest.raises(ValueError, match="an error of ours"):
        await asyncio.wait_for(rig.running, SECONDS)


def lane(name: str, version: int, **changes: Any) -> Any:
    values = {"url": f"http://{name}", "version": version, "held_from": None, "last_push": None}
    return SimpleNamespace(**values | {"is_blocked": False} | changes)


def test_of_several_servers_that_are_there_the_newest_is_pinned_and_a_single_one_never():
    lost = lane("c", -1)
    lanes = [lane("a", 3), lane("b", 4), lost]
    pin = Pin()
    pin.set(lanes, 5)
    assert [each.held_from for each in lanes] == [None, 5, None]
    assert pin.url == "http://b"
    pin.set(lanes, None)
    assert [each.held_from for each in lanes] == [None, None, None]
    assert pin.url is None
    pin.set([lanes[0], lost], 5)
    assert pin.url is None


@pytest.mark.parametrize(
    "change",
    [
        lambda lanes: setattr(lanes[1], "version", -1),
        lambda lanes: setattr(lanes[1], "is_blocked", True),
        lambda lanes: lanes.pop(0),
    ],
    ids=["others are lost", "others are blocked", "it is gone"],
)
def test_a_pinned_server_yields_when_the_others_cannot_serve_training_or_it_is_gone(change):
    pinned, *_ = lanes = [lane("a", 3), lane("b", 2)]
    pin = Pin()
    pin.set(lanes, 3)
    pin.yield_if_needed(lanes, 3)
    assert (pinned.held_from, pin.url) == (3, "http://a")
    change(lanes)
    pin.yield_if_needed(lanes, 4)
    assert (pinned.held_from, pin.url) == (None, None)


# Seconds, the other server's version, and the newest version.
TAKES_SOME = [(0, 3, 3), (9, 3, 4), (18, 4, 5), (27, 4, 5), (29, 4, 5)]


@pytest.mark.parametrize(
    ("push_seconds", "looks"), [(0.0, TAKES_SOME), (60.0, [(0, 3, 4), (239, 3, 4), (241, 3, 4)])]
)
def test_a_pinned_server_yields_when_the_others_take_nothing_for_several_pushes(
    push_seconds, looks, monkeypatch
):
    last_push = SimpleNamespace(push_seconds=push_seconds) if push_seconds else None
    lanes = [lane("a", 3), lane("b", 3, last_push=last_push)]
    pin, pinned = Pin(), list[str | None]()
    pin.set(lanes, 3)
    for second, version, published in looks:
        monkeypatch.setattr(module.time, "monotonic", lambda second=second: second)
        lanes[1].version = version
        pin.yield_if_needed(lanes, published)
        pinned.append(pin.url)
    assert pinned == ["http://a"] * (len(looks) - 1) + [None]
