# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What this machine offers to a run: training ranks, servers, and memory."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.inference.gpu_shares import ASLEEP_BYTES
from torchtitan.grpo.inference.kinds import KINDS
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.system import host_memory
from torchtitan.grpo.system.cpu_speed import bfloat16_speedup
from torchtitan.grpo.training.memory_choice import device_bytes, needed_bytes
from torchtitan.grpo.training.memory_estimate import available_bytes
from torchtitan.grpo.training.model_spec import parameter_shapes
from torchtitan.grpo.types import ServerKind

# Beside training on a CPU: the server's copy of a model and the push's snapshots, in bytes for a
# parameter, and the part of the memory for the server's cache.
_COPIES_ON_HOST, _CACHE_ON_HOST = 4 * 4, 0.15


@dataclass(frozen=True)
class Machine:
    """This machine, and how a run uses it.

    ``num_bytes`` is the memory of one GPU, or the free memory of a host without GPUs. ``python`` is the
    interpreter of the servers if it is not the trainer's. ``bfloat16_speedup`` is for a CPU, over float32.
    """

    device: str
    num_bytes: int
    num_gpus: int = 0
    num_ranks: int = 1
    num_servers: int = 1
    kind: ServerKind = "embedded"
    python: str | None = None
    bfloat16_speedup: float = 1.0

    @property
    def on_gpu(self) -> bool:
        return self.num_gpus > 0

    def describe(self) -> str:
        ranks = "1 training rank" if self.num_ranks == 1 else f"{self.num_ranks} training ranks"
        servers = "server" if self.num_servers == 1 else "servers"
        return f"{self.device}: {ranks}, {self.num_servers} {self.kind} {servers}"

    def step_memory(self, tables: dict[str, Any], model: HFModel) -> tuple[int, int]:
        """Returns the bytes that a training step is estimated to need, and the bytes that it may use."""
        if self.on_gpu:
            part = ASLEEP_BYTES / self.num_bytes if self.num_gpus == 1 else 0.0  # it is lent
            available = available_bytes(self.num_bytes, part)
        else:
            free = int((1 - _CACHE_ON_HOST) * available_bytes(self.num_bytes))
            available = max(0, free - _COPIES_ON_HOST * count_parameters(model))
        config = msgspec.convert(tables, type=JobConfig)
        return needed_bytes(config, model, self.num_ranks, available), available


def find_machine() -> Machine:
    """Describes this machine: servers get half of its GPUs; a single GPU, or the CPU, is shared."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        cores, free = f"{os.cpu_count()} CPU cores, no GPU", host_memory.available_bytes()
        return Machine(cores, free, bfloat16_speedup=bfloat16_speedup())
    device = f"{num_gpus} x {torch.cuda.get_device_name(0)}"
    num_bytes = device_bytes(torch.device("cuda", 0))
    num_servers = max(1, num_gpus // 2)
    num_ranks = max(1, num_gpus - num_servers)
    return Machine(device, num_bytes, num_gpus, num_ranks, num_servers, *_installed_servers())


def _installed_servers() -> tuple[ServerKind, str | None]:
    """Looks for vLLM and SGLang in the working folder and beside the trainer's environment."""
    for row in (KINDS["vllm"], KINDS["sglang"]):
        for folder in (Path(), Path(sys.prefix).parent):
            python = folder / (row.environment or "") / "bin" / "python"
            if os.access(python, os.X_OK):
                return row.name, str(python)
    return "embedded", None


def count_parameters(model: HFModel) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(JobConfig(), model).values())
