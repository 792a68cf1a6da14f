# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The backend is chosen anew whenever a server joins, and a reason against NCCL is given once."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from torchtitan.grpo.weight_sync.transports.group_transport import (
    GroupConnection,
    Handshake,
    NcclImpossible,
)
from torchtitan.grpo.weight_wire.group_facts import NCCL_SETTINGS, GroupFacts
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

TRAINER = GroupFacts("cuda", "2.13.0", "2.29.7", "GPU-a", dict.fromkeys(NCCL_SETTINGS, ""))
EQUAL = replace(TRAINER, gpu="GPU-b")
OTHER = replace(EQUAL, nccl="2.30.7", torch="2.14.1")
UNKNOWN = GroupFacts(device="cuda", hint="It keeps silent.")


class Server:
    """A server that tells what a test gives it, and takes every group."""

    url = "http://a"
    receives_pieces = True

    def __init__(self, *facts: GroupFacts) -> None:
        self.facts, self.joined = list(facts), list[str]()

    async def group_facts(self) -> list[GroupFacts]:
        return self.facts

    async def leave_weight_groups(self) -> None: ...

    async def resume(self) -> None: ...

    async def num_workers(self) -> int:
        return len(self.facts)

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        self.joined.append(info.backend)


class Source:
    """A source rank's sender, which notes the backend of the group that it opens."""

    def __init__(self, rank: int) -> None:
        self.rank, self.opened = rank, list[str]()

    async def group_facts(self) -> GroupFacts:
        return replace(TRAINER, gpu=f"GPU-of-{self.rank}")

    async def open(
        self, server_url: str, world_size: int, backend: str, in_pieces: bool
    ) -> WeightGroupInfo:
        self.opened.append(backend)
        return WeightGroupInfo("127.0.0.1", 1, 1, world_size, f"group{self.rank}", backend, 1.0)

    async def join(self, server_url: str) -> None: ...


def chosen(handshake: Handshake) -> str:
    return asyncio.run(handshake.backend([Source(0), Source(1)]))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_one_run_sends_to_one_server_over_nccl_and_to_another_over_gloo():
    async def body() -> None:
        for facts, backend in ((EQUAL, "nccl"), (OTHER, "gloo")):
            server: Any = Server(facts, replace(facts, gpu="GPU-c"))
            sources: Any = [Source(0), Source(1)]
            connection = GroupConnection(server, sources, {0: 1, 1: 1}, 20.0, "auto")
            await connection.join()
            # All sources use the same one.
            assert [source.opened for source in sources] == [[backend], [backend]]
            assert server.joined == [backend, backend]

    asyncio.run(body())


def test_a_reason_is_given_once_for_as_long_as_it_holds(caplog):
    caplog.set_level(logging.WARNING)
    server: Any = Server(OTHER)
    handshake = Handshake(server, "auto")
    assert [chosen(handshake) for _ in range(3)] == ["gloo"] * 3
    (warning,) = warnings(caplog)
    assert "NCCL 2.29.7" in warning
    assert "NCCL 2.30.7" in warning
    assert "http://a receives weights from host memory over gloo, because NCCL cannot" in warning
    server.facts = [EQUAL]  # it was restarted with the trainer's torch
    assert chosen(handshake) == "nccl"
    assert len(warnings(caplog)) == 1
    server.facts = [UNKNOWN]
    assert chosen(handshake) == "gloo"
    assert "It keeps silent. Set weight_sync.transport = 'nccl' to use it" in warnings(caplog)[1]


def test_nccl_refuses_a_server_that_differs_and_tries_one_that_keeps_silent(caplog):
    caplog.set_level(logging.WARNING)
    server: Any = Server(OTHER)
    with pytest.raises(NcclImpossible) as refused:
        chosen(Handshake(server, "nccl"))
    message = str(refused.value)
    assert "the trainer has NCCL 2.29.7 (torch 2.13.0)" in message
    assert "the server has NCCL 2.30.7 (torch 2.14.1)" in message
    assert message.endswith("Alternatively, set weight_sync.transport = 'auto' or 'host'.")
    assert refused.value.was_answered  # so that the run ends instead of retrying without end
    server.facts = [UNKNOWN]
    assert chosen(Handshake(server, "nccl")) == "nccl"
    assert "it is not known whether NCCL can be used" in warnings(caplog)[0]


def test_host_asks_neither_side(caplog):
    caplog.set_level(logging.WARNING)

    class Silent:
        url = "http://a"

    silent: Any = Silent()
    assert chosen(Handshake(silent, "host")) == "gloo"
    assert not warnings(caplog)
