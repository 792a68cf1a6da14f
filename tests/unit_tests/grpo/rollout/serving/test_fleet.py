# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A run starts once all of its servers are up, and not before."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from local_server import in_loop

from torchtitan.grpo.config import (
    GRPO,
    Evaluation,
    Inference,
    Prompts,
    Reward,
    Rollout,
    RolloutProcessConfig,
)
from torchtitan.grpo.inference.registry import Registration, RegistryFolder
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.fleet import ServerFleet
from torchtitan.grpo.types import PromptProgress


def fleet_of(
    *urls: str,
    file: Path | None = None,
    registry: Path | None = None,
    announce=None,
    startup_timeout_seconds: float = 120.0,
) -> ServerFleet:
    """A fleet of servers that the configuration, or a file, names, or that register themselves."""
    return ServerFleet(
        RolloutProcessConfig(
            grpo=GRPO(),
            prompts=Prompts(),
            rollout=Rollout(),
            inference=Inference(
                kind="embedded",
                launch=False,
                urls=list(urls),
                startup_timeout_seconds=startup_timeout_seconds,
                urls_file=None if file is None else str(file),
                registry=None if registry is None else str(registry),
            ),
            reward=Reward(),
            evaluation=Evaluation(),
            hf_assets_path="",
            vocab_size=128,
            eos_token_ids=[1],
            seq_len=32,
            seed=0,
            dump_folder="",
            server_gpus=[],
            start_version=0,
            progress=PromptProgress(),
        ),
        announce,
    )


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that refuses connections: it is bound, and nobody listens on it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


async def healthy_server(
    *, is_embedded: bool = True, peers: list[object] | None = None
) -> tuple[web.AppRunner, int]:
    """A server that answers each request for its health, and what an embedded server would tell.

    The address of the other end of each request's connection is appended to ``peers``.
    """
    told = {"model_path": "", "data": [{}], "tp_size": 1, "vocab_size": 128}
    told |= {"embedded": True} if is_embedded else {}

    async def answer(request: web.Request) -> web.Response:
        if peers is not None:
            assert request.transport is not None
            peers.append(request.transport.get_extra_info("peername"))
        return web.json_response(told)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]


@in_loop
async def test_the_requests_of_a_client_share_a_connection():
    """A closed connection is a reference cycle, which the garbage collector frees late."""
    peers: list[object] = []
    runner, port = await healthy_server(peers=peers)
    fleet = fleet_of(f"http://127.0.0.1:{port}")
    try:
        await fleet.start()
        (client,) = fleet.clients
        for _ in range(5):
            await client.health()
    finally:
        await fleet.close()
        await runner.cleanup()
    assert len(peers) > 5
    assert len(set(peers)) == 1


@pytest.mark.parametrize("down", ["first", "second"])
@in_loop
async def test_one_server_that_is_up_is_not_enough_to_start(unused_port: int, down: str):
    runner, port = await healthy_server()
    up, missing = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{unused_port}"
    both = fleet_of(
        *([missing, up] if down == "first" else [up, missing]), startup_timeout_seconds=3.0
    )
    alone = fleet_of(up)
    try:
        with pytest.raises(TimeoutError, match=missing):
            await both.start()
        await alone.start()
        assert [server.url for server in alone.servers] == [up]
        assert [server.software for server in alone.servers] == ["the embedded server"]
    finally:
        await both.close()
        await alone.close()
        await runner.cleanup()


def test_a_server_that_joins_later_and_cannot_be_used_leaves_again_by_name(tmp_path: Path):
    file = tmp_path / "urls.txt"

    async def main() -> None:
        right, port = await healthy_server()
        wrong, other = await healthy_server(is_embedded=False)
        up, unusable = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other}"
        file.write_text(f"{up}\n")
        announced: list[str] = []
        changes: asyncio.Queue[list[str]] = asyncio.Queue()

        async def tell(servers) -> None:
            changes.put_nowait([server.url for server in servers])

        fleet = fleet_of(file=file, announce=announced.append)
        try:
            await fleet.start()
            dispatcher = Dispatcher(fleet.clients, Rollout(), vocab_size=128)
            watching = asyncio.create_task(fleet.watch(dispatcher, tell))
            file.write_text(f"{up}\n{unusable}\n")
            async with asyncio.timeout(120):
                assert await changes.get() == [up, unusable]
                assert await changes.get() == [up]
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            assert list(dispatcher.servers) == [up]
        finally:
            await fleet.close()
            await right.cleanup()
            await wrong.cleanup()
        (text,) = announced
        assert unusable in text and "SGLang answers there" in text
        assert "The run continues without this server" in text

    asyncio.run(main())


def test_servers_that_register_join_and_those_that_leave_are_let_go_but_for_the_last(
    tmp_path: Path,
):
    folder = RegistryFolder(tmp_path / "registry")

    async def main() -> None:
        runners, records = [], []
        for index in range(2):
            runner, port = await healthy_server()
            runners.append(runner)
            url = f"http://127.0.0.1:{port}"
            records.append(Registration(url, "embedded", "host", index, 1.0))
        first, second = records
        stale = Registration("http://127.0.0.1:9", "embedded", "killed long ago", 3, 0.0)
        folder.write(stale)
        changes: asyncio.Queue[list[str]] = asyncio.Queue()

        async def tell(servers) -> None:
            changes.put_nowait([server.url for server in servers])

        fleet = fleet_of(registry=tmp_path / "registry", startup_timeout_seconds=1.0)
        try:
            with pytest.raises(TimeoutError, match="must register itself within"):
                await fleet.start()
            await fleet.close()
            fleet = fleet_of(registry=tmp_path / "registry")
            starting = asyncio.create_task(fleet.start())
            while not starting.done():  # as a server does, every two seconds
                first = first.next()
                folder.write(first)
                await asyncio.sleep(0.05)
            await starting
            assert [client.url for client in fleet.clients] == [first.url]
            dispatcher = Dispatcher(fleet.clients, Rollout(), vocab_size=128)
            watching = asyncio.create_task(fleet.watch(dispatcher, tell))
            folder.write(second)
            async with asyncio.timeout(120):
                assert sorted(await changes.get()) == sorted([first.url, second.url])
                folder.remove(first)
                assert await changes.get() == [second.url]
                folder.remove(second)
                folder.write(first.next())
                assert await changes.get() == [first.url]
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            assert list(dispatcher.servers) == [first.url]
        finally:
            await fleet.close()
            for runner in runners:
                await runner.cleanup()

    asyncio.run(main())


def test_an_unforeseen_error_in_a_late_check_ends_the_watch(tmp_path: Path, monkeypatch):
    file = tmp_path / "urls.txt"

    async def main() -> None:
        first, port = await healthy_server()
        second, other = await healthy_server()
        up, late = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other}"
        file.write_text(f"{up}\n")

        async def tell(servers) -> None:
            pass

        async def fail(client, needs):
            raise KeyError("a mistake of ours")

        fleet = fleet_of(file=file)
        try:
            await fleet.start()
            dispatcher = Dispatcher(fleet.clients, Rollout(), vocab_size=128)
            monkeypatch.setattr("torchtitan.grpo.rollout.serving.fleet.check_server", fail)
            watching = asyncio.create_task(fleet.watch(dispatcher, tell))
            file.write_text(f"{up}\n{late}\n")
            with pytest.raises(ExceptionGroup) as raised:
                await asyncio.wait_for(watching, 120)
            assert raised.group_contains(KeyError, match="a mistake of ours")
        finally:
            await fleet.close()
            await first.cleanup()
            await second.cleanup()

    asyncio.run(main())
