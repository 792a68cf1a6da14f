# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""When the rollout process counts as stuck: a dispatcher without servers, and a clock of the test's."""

from types import SimpleNamespace
from typing import Any

from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.vital_signs import VitalSigns


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FixedServer:
    """What the signs read of a server."""

    is_lost, version, load = False, 3, 2

    def __init__(self) -> None:
        self.ready = True

    def is_ready(self) -> bool:
        return self.ready

    def metrics(self) -> dict[str, float]:
        return {"inflight_rollouts": 2.0}


def opened(clock: Clock) -> tuple[VitalSigns, Any, FixedServer]:
    server, signs = FixedServer(), VitalSigns(10.0, 60.0, clock)
    dispatcher: Any = Dispatcher(
        [], vocab_size=8, request_timeout_seconds=1.0, max_consecutive_failures=1, group_size=2
    )
    dispatcher.servers["http://a:1"] = server
    session: Any = SimpleNamespace(
        dispatcher=dispatcher,
        producer=SimpleNamespace(is_asked=False, num_buffered=4),
        drops=DropLog(),
    )
    signs.begin(session)
    return signs, session, server


def test_starting_is_stuck_only_after_servers_had_their_time():
    clock = Clock()
    signs = VitalSigns(10.0, 60.0, clock)
    clock.now = 59.0
    assert signs.health().facts["phase"] == "starting"
    assert signs.health().problem is None
    assert signs.values() == {}
    clock.now = 61.0
    assert signs.health().status == "stuck"


def test_a_process_without_a_server_is_stuck_until_one_is_ready():
    clock = Clock()
    signs, _, server = opened(clock)
    clock.now = 100.0
    assert signs.health().problem is None  # the server is ready, and nobody asks
    server.ready = False
    signs.note()
    clock.now = 111.0
    problem = signs.health().problem
    assert problem is not None and "No server has been able to take work for 11 s" in problem
    server.ready = True
    assert signs.health().problem is None


def test_a_batch_for_which_nothing_ends_is_stuck_only_while_rank_0_waits():
    clock = Clock()
    signs, session, _ = opened(clock)
    session.producer.is_asked = True
    for clock.now in (5.0, 10.0, 15.0):
        signs.note()
    problem = signs.health().problem
    assert problem is not None and "no completion has ended for 15 s" in problem
    session.dispatcher._attempts.num_tokens += 7
    assert signs.health().problem is None
    clock.now = 30.0
    assert signs.health().status == "stuck"
    session.producer.is_asked = False
    assert signs.health().problem is None


def test_the_state_of_each_server_and_counts_are_told():
    signs, _, _ = opened(Clock())
    assert signs.health().facts["servers"]["http://a:1"] == {
        "state": "ready", "version": 3, "inflight_rollouts": 2,
    }  # fmt: skip
    values = signs.values()
    assert values["monitor/ready_servers"] == 1
    assert values["servers/a:1/inflight_rollouts"] == 2
    assert values["rollout/buffer_groups"] == 4
