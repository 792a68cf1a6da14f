# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Metrics of a run, through torchtitan's metrics processor.

Console, ``metrics.jsonl``, and upstream's TensorBoard and wandb loggers. Keys are paths
that end in a unit where they have one.
"""

import json
import netrc
import os
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims

from torchtitan.grpo.config_manager import JobConfig
from torchtitan.grpo.observe.progress import Progress


class GRPOMetricsProcessor(MetricsProcessor):
    """Upstream's processor with our keys; files and console on rank 0 alone.

    Attributes:
        history: One dict of metrics for each step since this process started.
    """

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None
    ) -> None:
        _keep_wandb_offline_without_key()
        super().__init__(job_config, parallel_dims, tag)
        self.history: list[dict[str, Any]] = []
        self._file: TextIO | None = None
        self._progress: Progress | None = None
        if dist.get_rank() == 0:
            folder = Path(job_config.job.dump_folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / "metrics.jsonl"
            self._progress = Progress(job_config.observe.progress, job_config.training.steps)

    def start(self, step: int) -> None:
        """Opens the files; a run that starts anew does not append to an older one's."""
        if self._progress is not None:
            self._file = self._path.open("a" if step else "w", encoding="utf-8", buffering=1)

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Records one step on rank 0; other ranks call it in vain."""
        if self._progress is None or self._file is None:
            return
        stats = self.device_memory_monitor.get_peak_stats()
        metrics = metrics | {"memory/peak_gib": stats.max_reserved_gib}
        self.device_memory_monitor.reset_peak_stats()
        record = {"step": step, **{key: round(value, 8) for key, value in metrics.items()}}
        self.history.append(record)
        self._file.write(json.dumps(record) + "\n")
        if self.should_log(step):
            self.logger.log(metrics, step)
        self._progress.update(step, metrics)

    def log_event(self, message: str) -> None:
        """A line above the progress display, on rank 0."""
        if self._progress is not None:
            self._progress.print(message)

    def close(self) -> None:
        super().close()
        if self._progress is not None:
            self._progress.close()
        if self._file is not None:
            self._file.close()
            self._file = None


def build_grpo_metrics_processor(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any = None
) -> GRPOMetricsProcessor:
    """What the TrainSpec names as ``build_metrics_processor_fn``."""
    return GRPOMetricsProcessor(job_config, parallel_dims)


def _keep_wandb_offline_without_key() -> None:
    """Without a key wandb would ask for one on the terminal; offline it writes a folder."""
    if "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ:
        return
    try:
        known = netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    if not known:
        os.environ["WANDB_MODE"] = "offline"
