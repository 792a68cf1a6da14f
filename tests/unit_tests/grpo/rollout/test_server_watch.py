# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from torchtitan.grpo.rollout import link_messages
from torchtitan.grpo.rollout.server_watch import ServerWatch
from torchtitan.grpo.types import ServerInfo

A, B = ServerInfo("http://a:1", "vllm"), ServerInfo("http://b:1", "vllm")


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[ServerWatch, zmq.Socket]]:
    """A watch, and the rollout process's end of it."""
    context = zmq.Context()
    theirs, ours = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    theirs.bind(f"ipc://{tmp_path}/servers")
    ours.connect(f"ipc://{tmp_path}/servers")
    watch = ServerWatch(ours)
    yield watch, theirs
    watch.close()
    theirs.close(linger=0)
    context.term()  # would wait for a socket that is open


def tell(socket: zmq.Socket, *servers: ServerInfo) -> None:
    socket.send(link_messages.encode(list(servers)))


def poll_until_news(watch: ServerWatch) -> list[ServerInfo]:
    while (servers := watch.poll()) is None:
        pass
    return servers


def test_each_change_is_heard_once_and_the_newest_counts(ends):
    watch, theirs = ends
    assert (watch.poll(), watch.servers()) == (None, [])
    watch.begin([A])
    assert (watch.poll(), watch.servers()) == (None, [A])
    tell(theirs, A, B)
    assert poll_until_news(watch) == [A, B]
    assert watch.poll() is None
    tell(theirs, B)
    tell(theirs, ServerInfo("http://a:1", "vllm", 2))
    while watch.servers() != [ServerInfo("http://a:1", "vllm", 2)]:
        pass
    # What one thread has seen is news to the one that polls.
    assert watch.poll() == [ServerInfo("http://a:1", "vllm", 2)]
    assert watch.poll() is None


def test_news_from_before_the_start_is_known_is_kept(ends):
    watch, theirs = ends
    tell(theirs, A, B)
    while not watch.servers():
        pass
    watch.begin([A])
    assert watch.servers() == [A, B]
    assert watch.poll() == [A, B]
