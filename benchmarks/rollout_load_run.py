# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the trainer of `rollout_load.py`.

    torchrun --nproc_per_node=1 benchmarks/rollout_load_run.py OUT.json N ARGUMENTS

This is the real trainer, except that the rollout process and the reward workers are stopped
(SIGSTOP) while the trainer computes, in about half of the steps after the N-th, drawn at random.
(If they were stopped in every second step, each such step would follow a step without a stop, whose
data was late and whose weights had been pushed by then.) The computing time of each step is written
to OUT.json.
"""

# ruff: noqa: E402  (the device is settled before torchtitan's modules read it)

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.grpo.system.child import die_with_parent
from torchtitan.grpo.system.device import settle_device

settle_device()

import psutil

from torchtitan.grpo.data.feed import TrainBatch
from torchtitan.grpo.start.entry import leave, run
from torchtitan.grpo_train import GRPOTrainer

_OUT = Path(sys.argv[1])
_FIRST = int(sys.argv[2])


class StoppingTrainer(GRPOTrainer):
    """Stops the other processes in about half of the steps, drawn at random.

    Attributes:
        steps: For each step, whether the other processes were stopped, and its seconds.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[tuple[bool, float]] = []
        self._random = random.Random(0)
        self._others: list[psutil.Process] = []

    def _train_step(self, batch: TrainBatch) -> bool:
        if self.step == _FIRST:
            # All processes that this one has started. The servers are not among them.
            self._others = psutil.Process().children(recursive=True)
        is_alone = self.step > _FIRST and self._random.random() < 0.5
        if is_alone:
            _signal(self._others, signal.SIGSTOP)
        begin = time.perf_counter()
        try:
            return super()._train_step(batch)
        finally:
            self.steps.append((is_alone, time.perf_counter() - begin))
            if is_alone:
                _signal(self._others, signal.SIGCONT)

    def _finish(self) -> None:
        super()._finish()
        _OUT.write_text(json.dumps(self.steps))


def _signal(processes: list[psutil.Process], signum: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signum)


def main() -> int:
    die_with_parent()
    return run(StoppingTrainer, sys.argv[3:])


if __name__ == "__main__":
    leave(main)
