"""A bounded number of versions is alive, whatever lanes do with them."""

import asyncio

from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.versions import ServerVersions, Versions


class Sources:
    """Keeps what it was told to drop; may be slow to do so."""

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.may_finish = asyncio.Event()
        self.may_finish.set()

    async def drop(self, version: int) -> None:
        self.dropped.append(version)
        await self.may_finish.wait()


def new_versions(max_alive: int, sources: Sources) -> Versions:
    return Versions(SlotTable(2), max_alive, sources.drop)


async def test_a_version_is_dropped_when_it_is_not_the_newest_and_nobody_sends_it():
    sources = Sources()
    versions = new_versions(5, sources)
    await versions.begin(1)
    with versions.sending(1):
        await versions.begin(2)
        await versions.begin(3)
        await asyncio.sleep(0)
        assert sources.dropped == [2]
    await asyncio.sleep(0)
    assert sources.dropped == [2, 1]
    assert await versions.room(1)
    await versions.close()


async def test_there_is_no_room_until_a_dropped_versions_buffers_are_free():
    sources = Sources()
    sources.may_finish.clear()  # a broadcast that was given up still reads it
    versions = new_versions(2, sources)
    await versions.begin(1)
    await versions.begin(2)
    assert not await versions.room(0.01)
    assert versions.num_alive == 2
    sources.may_finish.set()
    assert await versions.room(10)
    assert versions.num_alive == 1
    await versions.close()


async def test_a_base_is_kept_while_there_is_room_and_gives_way_when_there_is_not():
    sources = Sources()
    versions = new_versions(3, sources)
    for version in (1, 2):
        await versions.begin(version)
        versions.want_base(version)
    await asyncio.sleep(0)
    assert sources.dropped == []
    assert await versions.room(1)
    await versions.begin(3)
    assert versions.has(1)
    assert await versions.room(1)  # only if the oldest base gives way
    assert sources.dropped == [1]
    assert not versions.has(1) and versions.has(2)
    await versions.close()


async def test_what_is_being_dropped_is_no_base_though_its_buffers_are_still_there():
    sources = Sources()
    sources.may_finish.clear()
    versions = new_versions(2, sources)
    server = ServerVersions(versions)
    for version in (1, 2):
        await versions.begin(version)
        server.keep_as_base(version)
    await versions.begin(3)
    assert server.base == 2
    assert not await versions.room(0.01)
    assert (sources.dropped, versions.num_alive) == ([1, 2], 3)
    assert server.base is None
    sources.may_finish.set()
    assert await versions.room(10)
    server.keep_as_base(3)
    assert server.base == 3
    server.confirmed = 3
    server.lose()
    assert (server.confirmed, server.base) == (-1, None)
    await versions.close()


async def test_a_slot_is_held_until_its_version_is_dropped():
    sources, slots = Sources(), SlotTable(2, max_held=1)
    sources.may_finish.clear()
    versions = Versions(slots, 3, sources.drop)
    slots.filled(slots.reserve(), 1)
    taken = await versions.take_newest(10)
    assert taken is not None and taken.is_held
    await versions.begin(1)
    versions.gathered(taken)
    assert not slots.can_hold()
    await versions.begin(2)
    await asyncio.sleep(0)
    assert sources.dropped == [1]
    assert not slots.can_hold(), "a server may still be sent from it"
    sources.may_finish.set()
    assert await versions.room(10)
    while not slots.can_hold():
        await asyncio.sleep(0.01)
    await versions.close()
