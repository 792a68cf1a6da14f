# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path

import aiohttp
import pytest
from server_kinds import held_port

from torchtitan.grpo.inference.registry import Registration, RegistryFolder
from torchtitan.grpo.inference.serve import Registrar
from torchtitan.grpo.rollout.serving.registry_server import RegistryServer

ONE = Registration("http://10.0.0.1:8000", "embedded", "alpha", 12, 100.0)


@contextlib.asynccontextmanager
async def registry_in(folder: Path, address: str = "") -> AsyncIterator[str]:
    """A registry with the key ``secret``."""
    address = address or f"127.0.0.1:{held_port()}"
    server = RegistryServer(address, "secret", RegistryFolder(folder))
    try:
        await server.start()
        yield f"http://{address}"
    finally:
        await server.close()


async def test_a_server_registers_and_leaves(tmp_path: Path):
    async with registry_in(tmp_path) as url:
        registrar = Registrar(url, ONE, "secret")
        await asyncio.to_thread(registrar.beat)
        await asyncio.to_thread(registrar.beat)
        assert RegistryFolder(tmp_path).read() == [ONE.next().next()]
        await asyncio.to_thread(Registrar(url, replace(ONE, pid=13), "secret").leave)
        assert RegistryFolder(tmp_path).read(), "another process has another registration"
        await asyncio.to_thread(registrar.leave)
        assert RegistryFolder(tmp_path).read() == []


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
async def test_a_request_without_key_or_sense_registers_nothing(
    tmp_path: Path, headers, body, status
):
    async with (
        registry_in(tmp_path) as url,
        aiohttp.ClientSession() as session,
        session.put(f"{url}/servers", json=body, headers=headers) as answer,
    ):
        assert answer.status == status
    assert RegistryFolder(tmp_path).read() == []


async def test_a_registry_that_is_down_is_told_once_and_tried_again(tmp_path: Path, capsys):
    address = f"127.0.0.1:{held_port()}"
    registrar = Registrar(f"http://{address}", ONE, "secret")
    for _ in range(3):
        await asyncio.to_thread(registrar.beat)
    assert capsys.readouterr().err.count("cannot register") == 1
    async with registry_in(tmp_path, address):
        await asyncio.to_thread(registrar.beat)
    assert "is registered" in capsys.readouterr().err
    assert [one.beat for one in RegistryFolder(tmp_path).read()] == [4]


async def test_an_address_of_another_host_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match=r"inference\.registry_address must be a free port"):
        async with registry_in(tmp_path, "192.0.2.7:8000"):
            pass
