# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Servers register themselves in a folder; the reader tells the living from the dead."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from torchtitan.grpo.inference.registry import (
    DEAD_SECONDS,
    RegisteredServers,
    Registration,
    RegistryFolder,
    parse_registration,
)

ONE = Registration("http://10.0.0.1:8000", "embedded", "alpha", 12, 100.0)
TWO = Registration("http://10.0.0.2:8000", "embedded", "beta", 12, 100.0)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> RegistryFolder:
    return RegistryFolder(tmp_path / "registry")


@pytest.fixture
def servers(tmp_path: Path, clock: Clock) -> RegisteredServers:
    return RegisteredServers(tmp_path / "registry", "embedded", clock)


def test_a_file_that_was_there_before_counts_once_it_is_written_again(folder, servers):
    folder.write(ONE)  # perhaps by a server that was killed last week
    assert servers.poll() is None
    folder.write(ONE.next())
    assert servers.poll() == [ONE.url]
    assert servers.poll() is None, "nothing has changed"


def test_a_server_that_leaves_or_falls_silent_is_no_longer_named(folder, servers, clock):
    servers.poll()
    for one in (ONE, TWO):
        folder.write(one)
    assert servers.poll() == [ONE.url, TWO.url]
    folder.remove(ONE)
    assert servers.poll() == [TWO.url]
    folder.write(ONE)
    assert servers.poll() == [ONE.url, TWO.url]
    clock.seconds = DEAD_SECONDS + 1
    folder.write(TWO.next())
    assert servers.poll() == [TWO.url]
    folder.write(ONE.next())
    assert servers.poll() == [ONE.url, TWO.url], "a link that comes back"


def test_the_last_server_is_kept_when_all_are_silent(folder, servers, clock):
    servers.poll()
    folder.write(ONE)
    assert servers.poll() == [ONE.url]
    clock.seconds = DEAD_SECONDS + 1
    assert servers.poll() is None
    with pytest.raises(ValueError, match="at least one server"):
        servers.read()


def test_a_server_removes_its_own_file_alone(folder):
    folder.write(ONE)
    successor = replace(ONE, pid=13).next()
    folder.write(successor)
    folder.remove(ONE.next())
    assert folder.read() == [successor]
    folder.remove(successor.next())
    assert folder.read() == []


def test_what_is_no_registration_and_servers_of_another_kind_are_passed_over(
    tmp_path, folder, servers
):
    servers.poll()
    folder.write(replace(TWO, kind="vllm"))
    (tmp_path / "registry" / "half.json").write_text('{"url": "http://')
    (tmp_path / "registry" / "list.json").write_text("[1]")
    assert servers.poll() is None
    folder.write(ONE)
    assert servers.poll() == [ONE.url]
    assert not list((tmp_path / "registry").glob(".part-*"))


def test_the_folder_is_for_its_owner_alone(tmp_path, folder):
    folder.write(ONE)
    assert (tmp_path / "registry").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "change",
    [
        {"url": "file:///etc/passwd"}, {"url": 3}, {"kind": 1}, {"pid": "1"}, {"host": None},
        {"beat": True}, {"more": 1},
    ],
)  # fmt: skip
def test_a_registration_is_checked(change):
    assert parse_registration(json.dumps(asdict(ONE)).encode()) == ONE
    with pytest.raises(ValueError):
        parse_registration(json.dumps(asdict(ONE) | change).encode())


def test_a_file_that_is_longer_than_any_registration_is_passed_over(folder):
    folder.write(replace(ONE, host="a" * 10_000))
    folder.write(TWO)
    assert folder.read() == [TWO]
