# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""When the rollout process may use the training devices, as its own side sees it."""

from torchtitan.grpo.rollout.lending.lender import DeviceRequests
from torchtitan.grpo.rollout.link_messages import DevicesWanted


def requests(start_version: int = 0) -> tuple[DeviceRequests, list[int]]:
    """Returns them with the versions for which rank 0 was asked."""
    asked: list[int] = []

    async def send(message: DevicesWanted) -> None:
        asked.append(message.version)

    return DeviceRequests(send, start_version), asked


async def test_the_devices_are_asked_for_once_and_free_until_the_batch_is_delivered():
    devices, asked = requests()
    news = list[bool]()
    devices.listeners.append(lambda: news.append(devices.are_free))
    await devices.want(0)
    await devices.want(0)
    assert asked == [0] and not devices.are_free
    devices.free(0)
    assert news == [True] and devices.are_free
    await devices.want(0)
    devices.deliver(0)
    assert asked == [0] and not devices.are_free
    await devices.want(1)
    assert asked == [0, 1]


async def test_they_are_not_taken_for_free_once_the_batch_has_overtaken_the_notice():
    devices, _ = requests()
    await devices.want(0)
    devices.deliver(0)
    devices.free(0)
    assert not devices.are_free


async def test_they_are_free_from_the_start_if_rank_0_says_so_before_it_is_asked():
    devices, asked = requests(start_version=7)
    devices.free(7)
    await devices.want(7)
    assert devices.are_free and asked == []
