# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trains, and makes a lane wait in a state that the test chooses, so that a fault can hit it there.

``HELD_LANE`` names a folder. The test writes a state into its file ``hold``. The next lane that
enters this state renames the file to ``held``, writes its server's URL into it, and goes on once the
test has removed it. Its event loop waits as well, as on a machine that is slow at this moment.
"""

import os
import runpy
import time
from pathlib import Path

from torchtitan.grpo.weight_sync.lane import Lane, LaneEvent, next_state

_FOLDER = Path(os.environ["HELD_LANE"])
_LONGEST_SECONDS = 30.0


def _hold(lane: Lane) -> None:
    hold, held = _FOLDER / "hold", _FOLDER / "held"
    if not hold.exists() or hold.read_text() != lane.state.value:
        return
    hold.write_text(lane.url)
    hold.rename(held)
    deadline = time.monotonic() + _LONGEST_SECONDS
    while held.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def _take(lane: Lane, event: LaneEvent, **_: object) -> None:
    lane.state = next_state(lane.state, event)
    lane._listeners.on_change()
    _hold(lane)


if __name__ == "__main__":
    Lane._take = _take
    runpy.run_module("torchtitan.grpo_train", run_name="__main__", alter_sys=True)
