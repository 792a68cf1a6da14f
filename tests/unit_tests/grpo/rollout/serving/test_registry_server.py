# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Servers that share no disk with the trainer register over HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path

import aiohttp
import pytest

from torchtitan.grpo.inference.local_servers import free_ports
from torchtitan.grpo.inference.registrar import Registrar
from torchtitan.grpo.inference.registry import Registration, RegistryFolder
from torchtitan.grpo.rollout.serving.registry_server import RegistryServer

ONE = Registration("http://10.0.0.1:8000", "embedded", "alpha", 12, 100.0)


def with_registry(folder: Path, test: Callable[[str], Awaitable[None]]) -> None:
    """Runs a test against a registry with the key ``secret``."""

    async def main() -> None:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        server = RegistryServer(address, "secret", RegistryFolder(folder))
        await server.start()
        try:
            await test(f"http://{address}")
        finally:
            await server.close()

    asyncio.run(main())


def test_a_server_registers_and_leaves(tmp_path: Path):
    async def test(url: str) -> None:
        registrar = Registrar(url, ONE, "secret")
        await asyncio.to_thread(registrar.beat)
        await asyncio.to_thread(registrar.beat)
        assert RegistryFolder(tmp_path).read() == [ONE.next().next()]
        await asyncio.to_thread(Registrar(url, replace(ONE, pid=13), "secret").leave)
        assert RegistryFolder(tmp_path).read(), "another process has another registration"
        await asyncio.to_thread(registrar.leave)
        assert RegistryFolder(tmp_path).read() == []

    with_registry(tmp_path, test)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, asdict(ONE), 401),
        ({"Authorization": "Bearer wrong"}, asdict(ONE), 401),
        ({"Authorization": "Bearer secret"}, {"url": "http://10.0.0.1:1"}, 400),
        ({"Authorization": "Bearer secret"}, asdict(ONE) | {"host": "x" * 9000}, 413),
        ({"Authorization": "Bearer secret", "Content-Type": "text/plain"}, asdict(ONE), 415),
    ],
)
def test_a_request_without_key_or_sense_registers_nothing(tmp_path: Path, headers, body, status):
    async def test(url: str) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.put(f"{url}/servers", json=body, headers=headers) as answer,
        ):
            assert answer.status == status
        assert RegistryFolder(tmp_path).read() == []

    with_registry(tmp_path, test)


def test_a_registry_that_is_down_is_told_once_and_tried_again(tmp_path: Path, capsys):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    registrar = Registrar(f"http://{address}", ONE, "secret")
    for _ in range(3):
        registrar.beat()
    assert capsys.readouterr().err.count("cannot register") == 1

    async def main() -> None:
        server = RegistryServer(address, "secret", RegistryFolder(tmp_path))
        await server.start()
        await asyncio.to_thread(registrar.beat)
        await server.close()

    asyncio.run(main())
    assert "is registered" in capsys.readouterr().err
    assert [one.beat for one in RegistryFolder(tmp_path).read()] == [4]


def test_an_address_of_another_host_is_refused_by_name(tmp_path: Path):
    server = RegistryServer("192.0.2.7:8000", "secret", RegistryFolder(tmp_path))

    async def main() -> None:
        with pytest.raises(ValueError, match=r"inference\.registry_address must be a free port"):
            await server.start()
        await server.close()

    asyncio.run(main())
