# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A training rank whose first push takes seconds, and which tells each second what it waits for."""

import asyncio
import runpy
from typing import Any

from torchtitan.grpo.observe import console
from torchtitan.grpo.weight_sync.lane import Lane

_push = Lane._push


async def _slow_push(self: Lane, version: int) -> Any:
    if self.num_pushes == 0:
        await asyncio.sleep(4)
    return await _push(self, version)


if __name__ == "__main__":
    console._TELL_SECONDS = 1.0
    Lane._push = _slow_push
    runpy.run_module("torchtitan.grpo_train", run_name="__main__", alter_sys=True)
