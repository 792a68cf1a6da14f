# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A version on disk is complete under its name, or it does not exist."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan.grpo.inference.client import Capabilities
from torchtitan.grpo.weight_sync.transports.disk_transport import DiskConnection, DiskTransport
from torchtitan.grpo.weight_sync.transports.interface import NotPrepared
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec
from torchtitan.grpo.weight_wire.version_files import VersionDirectories, read_weights, write_part

SHAPES = ((3,), (2, 5))  # the second begins at an odd place


def make_bucket(*names: str) -> tuple[BucketSpec, torch.Tensor]:
    tensors = [torch.randn(shape).bfloat16() for shape in SHAPES]
    payload = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])
    return BucketSpec(names, ("bfloat16",) * 2, SHAPES), payload


class Writer:
    """A source rank's sender, which writes when it is allowed to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bucket = make_bucket(f"a{rank}", f"b{rank}")
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.error: OSError | None = None
        self.num_written = 0

    async def write(self, version: int, directory: str) -> None:
        await self.may_write.wait()
        if self.error is not None:
            raise self.error
        await asyncio.to_thread(write_part, Path(directory), self.rank, [self.bucket])
        self.num_written += 1


async def make_transport(
    folder: Path, writers: list[Writer], timeout_seconds: float = 10.0
) -> DiskTransport:
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors.index.json").write_text("{}")
    plan: Any = SimpleNamespace(num_bytes=52)
    senders: Any = writers
    transport = DiskTransport(
        plan,
        lambda: VersionDirectories(folder / "versions", source),
        timeout_seconds,
    )
    await transport.lead(senders)
    return transport


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_the_parts_of_all_sources_become_one_directory_with_checksums(tmp_path):
    writers = [Writer(0), Writer(2)]
    transport = await make_transport(tmp_path, writers)
    path, num_bytes = await transport.written(4)
    assert num_bytes == 52
    assert path == tmp_path / "versions" / "version-4"
    assert names_in(path) == {
        "config.json",
        "checksums.json",
        "model-rank00000.safetensors",
        "model-rank00002.safetensors",
    }
    found = read_weights(str(path))  # compares the checksums, too
    assert set(found) == {"a0", "b0", "a2", "b2"}
    for writer in writers:
        first, second = writer.bucket[1].split([6, 20])
        assert torch.equal(found[f"a{writer.rank}"].view(torch.uint8), first)
        assert torch.equal(found[f"b{writer.rank}"].view(torch.uint8).view(-1), second)


async def test_a_version_is_written_once_for_all_who_ask_and_removed_for_good(tmp_path):
    writer = Writer(0)
    transport = await make_transport(tmp_path, [writer])
    writer.may_write.clear()
    asking = [asyncio.create_task(transport.written(1)) for _ in range(3)]
    async with asyncio.timeout(30):
        while not (tmp_path / "versions/version-1.partial").exists():
            await asyncio.sleep(0.01)
    with pytest.raises(NotPrepared, match=r"longer than weight_sync\.timeout"):
        transport._timeout_seconds = 0.01
        await transport.written(1)
    # Nobody sees a directory that is not whole.
    assert names_in(tmp_path / "versions") == {"version-1.partial"}
    writer.may_write.set()
    assert len({path for path, _ in await asyncio.gather(*asking)}) == 1
    assert writer.num_written == 1
    await transport.forget(1)
    await transport.forget(1)
    assert names_in(tmp_path / "versions") == set()


async def test_removing_a_version_amid_its_writing_leaves_nothing(tmp_path):
    writers = [Writer(0), Writer(1)]
    transport = await make_transport(tmp_path, writers)
    writers[1].may_write.clear()
    asking = asyncio.create_task(transport.written(1))
    while not writers[0].num_written:
        await asyncio.sleep(0.01)
    removing = asyncio.create_task(transport.forget(1))
    asking.cancel()
    writers[1].may_write.set()
    await removing
    assert names_in(tmp_path / "versions") == set()


async def test_a_version_that_one_source_cannot_write_is_tried_again_once_the_others_are_done(
    tmp_path,
):
    writers = [Writer(0), Writer(1)]
    transport = await make_transport(tmp_path, writers)
    writers[0].error = OSError(28, "No space left on device")
    writers[1].may_write.clear()
    asking = asyncio.create_task(transport.written(1))
    await asyncio.sleep(0.05)
    assert not asking.done(), "the directory still belongs to a writer"
    writers[1].may_write.set()
    with pytest.raises(NotPrepared, match="No space left"):
        await asking
    assert names_in(tmp_path / "versions") == set()
    writers[0].error = None
    path, _ = await transport.written(1)
    assert set(read_weights(str(path))) == {"a0", "b0", "a1", "b1"}


async def test_a_changed_byte_and_a_missing_tensor_are_noticed_when_read(tmp_path):
    transport = await make_transport(tmp_path, [Writer(0), Writer(1)])
    path, _ = await transport.written(1)
    (path / "model-rank00001.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"must name exactly the tensors beside it; \['a1', 'b1'\]"
    ):
        read_weights(str(path))
    path, _ = await transport.written(2)
    file = path / "model-rank00000.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match="must have checksum"):
        read_weights(str(path))


def test_a_predecessors_versions_are_removed_and_nothing_else(tmp_path):
    root = tmp_path / "versions"
    for name in ("version-3.partial", "version-2", "version-1", "other"):
        (root / name).mkdir(parents=True)
    (root / "version-2" / "checksums.json").write_text("{}")
    VersionDirectories(root, tmp_path)
    assert names_in(root) == {"version-1", "other"}


class Loading:
    """A server that loads whatever it is told to, and the order of all that happens to it."""

    url = "http://a"

    def __init__(self, stops_for: Any) -> None:
        self.capabilities = Capabilities(stops_for=stops_for)
        self.order: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> float:
            self.order.append((name, *arguments))
            return 0.25

        return call


async def test_a_server_that_does_not_load_a_version_in_time_is_named_with_the_setting(tmp_path):
    class Hanging(Loading):
        async def update_from_disk(self, path: str, version: int) -> float:
            await asyncio.Event().wait()
            return 0.0

    server: Any = Hanging("nothing")
    connection = DiskConnection(server, await make_transport(tmp_path, [Writer(0)]), 0.1)
    with pytest.raises(
        TimeoutError, match=r"http://a must load version 3 .*weight_sync.timeout_seconds = 0.1,"
    ):
        await connection.push(3, None)


@pytest.mark.parametrize("stops_for", ["transfer", "commit", "nothing"])
async def test_a_server_that_stands_still_while_it_loads_a_version_is_resumed_after_it(
    tmp_path, stops_for: str
):
    server: Any = Loading(stops_for)
    transport = await make_transport(tmp_path, [Writer(0)])
    connection = DiskConnection(server, transport, 10.0)
    await connection.join()
    assert server.order == [("leave_weight_groups",), ("resume",)]
    server.order.clear()
    report = await connection.push(3, None)
    load = ("update_from_disk", str(tmp_path / "versions" / "version-3"), 3)
    stands_still = stops_for != "nothing"
    assert server.order == ([("pause",), load, ("resume",)] if stands_still else [load])
    assert (report.version, report.num_bytes) == (3, 52)
    if not stands_still:
        assert report.pause_seconds == 0.25  # by the server's own clock
