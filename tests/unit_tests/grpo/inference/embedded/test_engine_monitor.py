# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""When an embedded server counts as stuck, by what its engine says of itself."""

from types import SimpleNamespace
from typing import Any

from torchtitan.grpo.inference.embedded.server import EngineMonitor


def test_an_engine_is_stuck_if_it_takes_no_step_between_two_questions():
    engine: Any = SimpleNamespace(
        num_running=1, num_waiting=0, num_steps=5, is_paused=False, is_alive=True, version="3",
        failure=None,
    )  # fmt: skip
    now = 0.0
    monitor = EngineMonitor(engine, lambda: now)
    assert monitor.health().facts["phase"] == "generating"
    now = 119.0
    assert monitor.health().problem is None
    now = 121.0
    problem = monitor.health().problem
    assert problem is not None and "no step was taken for 121 s" in problem
    engine.num_steps += 1
    assert monitor.health().problem is None

    engine.is_paused = True
    now = 500.0
    assert monitor.health().facts["phase"] == "paused"
    assert monitor.health().problem is None
    engine.is_alive, engine.failure = False, MemoryError("no room")
    problem = monitor.health().problem
    assert problem is not None and "MemoryError('no room')" in problem
