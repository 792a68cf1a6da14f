# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds the sockets on which processes listen, once or for as long as a program runs."""

import contextlib
import ipaddress
import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import psutil

_LOOK_SECONDS = 0.2
_MARK = "TORCH_GRPO_TEST_MARK"


def session_of(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found


def marked_with(variable: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, str]]:
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())[:500]
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((command, connection.laddr.ip))
    return found


def beyond_loopback(found: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(command, ip) for command, ip in found if not ipaddress.ip_address(ip).is_loopback}


@contextmanager
def watched(processes: Callable[[], list[psutil.Process]]) -> Iterator[set[tuple[str, str]]]:
    found: set[tuple[str, str]] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            found.update(listening(processes()))

    thread = threading.Thread(target=watch, name="listening")
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join(60)


def run_watched(
    command: list[str],
) -> tuple[subprocess.CompletedProcess[str], set[tuple[str, str]]]:
    mark = uuid.uuid4().hex
    with watched(lambda: marked_with(_MARK, mark)) as found:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=840, env=os.environ | {_MARK: mark}
        )
    return result, found


def check_sockets(found: set[tuple[str, str]]) -> None:
    for words in ("--model", "torchtitan.grpo_train"):
        assert any(words in command for command, _ in found), (words, found)
    assert not beyond_loopback(found)
