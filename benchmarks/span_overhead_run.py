# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the rank of `span_overhead.py`: the real trainer on recorded batches, with spans on and off.

torchrun --nproc_per_node=1 benchmarks/span_overhead_run.py JOB.json RESULT.json
"""

# ruff: noqa: E402  (the device is settled before torchtitan's modules read it)

import time
from pathlib import Path
from typing import Any

from torchtitan.grpo.system.device import settle_device

settle_device()

from rank_job import answer_job

from torchtitan.grpo.config_checks import load_config
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo_train import GRPOTrainer

# What a rank of a pipeline records in a step of 25 microbatches: F, I, W, and waits.
_SPANS_PER_STEP = 100


class TimedTrainer(GRPOTrainer):
    """Turns spans on and off in turns, a block of steps each, and keeps each step's time and processor time."""

    def __init__(self, *args: Any, block: int, folder: Path) -> None:
        super().__init__(*args)
        self.block, self.folder = block, folder
        self.seconds: list[tuple[float, float]] = []

    def _train_step(self, batch: Any) -> bool:
        block, in_block = divmod(len(self.seconds), self.block)
        if in_block == 0:
            # Off, on, on, off: so a machine that slowly changes its speed counts equally.
            if block % 4 in (1, 2):
                spans.open_spans(self.folder, "rank 0")
            else:
                spans.close_spans()
        begin, computed = time.perf_counter(), time.process_time()
        goes_on = super()._train_step(batch)
        for i in range(_SPANS_PER_STEP):
            with spans.span("pipeline", "F", stage=0, microbatch=i):
                pass
        self.seconds.append((time.perf_counter() - begin, time.process_time() - computed))
        return goes_on

    def _finish(self) -> None:
        """Does nothing: no model is exported."""


def work(job: dict[str, Any]) -> list[tuple[float, float]]:
    config = load_config(job["args"])
    hf_model = read_hf_model(config.model.hf_assets_path)
    channel = RankChannel(60.0, lambda lost: None)
    folder = Path(config.job.dump_folder)
    trainer = TimedTrainer(
        config, hf_model, StopRequest(60.0), channel, block=job["block"], folder=folder
    )
    try:
        trainer.train()
        return trainer.seconds
    finally:
        spans.close_spans()
        trainer.close()
        channel.close()


if __name__ == "__main__":
    answer_job(work, opens_group=False)
