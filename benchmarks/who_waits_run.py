# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the ranks of `who_waits.py`: the real trainer, with stamps of a clock of its own.

``WHO_WAITS`` in the environment is a JSON object: the path of the ``stamps``, and what is slow
(``slow_rank`` and ``block_seconds``, or ``fsync_seconds``).
"""

# ruff: noqa: E402  (the device is settled before torchtitan's modules read it)

import json
import os
import time
from pathlib import Path
from typing import Any

from torchtitan.grpo.system.device import settle_device

settle_device()

import torch.distributed as dist

from torchtitan import grpo_train
from torchtitan.grpo.models.decoder import blocks_of
from torchtitan.grpo.observe import metrics_processor
from torchtitan.grpo.start.entry import leave

JOB: dict[str, Any] = json.loads(os.environ["WHO_WAITS"])
stamps: dict[str, float] = {}


class StampedTrainer(grpo_train.GRPOTrainer):
    def __init__(self, *arguments: Any) -> None:
        stamps["begin"] = time.monotonic()
        super().__init__(*arguments)
        if dist.get_rank() == JOB.get("slow_rank"):
            for block in blocks_of(self.model_parts[0]):
                part = next(block.children())
                part.register_forward_hook(lambda *_: time.sleep(JOB["block_seconds"]))


def slow_down_fsync(seconds: float) -> None:
    fsync = os.fsync

    def slow(file: int) -> None:
        time.sleep(seconds)
        fsync(file)

    os.fsync = slow


def main() -> int:
    write = metrics_processor.write_summary

    def stamp_and_write(folder: Path, summary: dict[str, Any]) -> None:
        stamps["end"] = time.monotonic()
        write(folder, summary)
        Path(JOB["stamps"]).write_text(json.dumps(stamps))

    metrics_processor.write_summary = stamp_and_write
    grpo_train.GRPOTrainer = StampedTrainer
    if "fsync_seconds" in JOB:
        slow_down_fsync(JOB["fsync_seconds"])
    return grpo_train.main()


if __name__ == "__main__":
    leave(main)
