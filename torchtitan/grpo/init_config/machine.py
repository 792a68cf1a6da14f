# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What this machine offers to a run: training ranks, servers, and memory."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from torchtitan.grpo.inference.gpu_shares import part_beside_training
from torchtitan.grpo.inference.kinds import KINDS
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.system import host_memory
from torchtitan.grpo.training.memory_choice import device_bytes, needed_bytes
from torchtitan.grpo.training.memory_estimate import available_bytes
from torchtitan.grpo.training.model_spec import parameter_shapes
from torchtitan.grpo.types import ServerKind

_FP32 = 4
_ESTIMATE_ERROR = 0.1  # of the memory of a step, as its description says
# Copies of a model beside training on a CPU, in float32: the server's, and the push's snapshots.
_COPIES_ON_HOST = 4
_CACHE_ON_HOST = 0.15
# Part of a server's GPU for it, if training does not share it, and of what its weights leave the part
# that its cache may take: it is copied when it grows.
_OF_OWN_GPU, _CACHE_ON_GPU = 0.9, 0.4


@dataclass(frozen=True)
class Machine:
    """``num_bytes`` is the memory of a GPU, or what is free of the host's.

    ``python`` is the interpreter of the servers if it is not the trainer's.
    """

    device: str
    num_bytes: int
    num_gpus: int = 0
    num_ranks: int = 1
    num_servers: int = 1
    kind: ServerKind = "embedded"
    python: str | None = None

    @property
    def on_gpu(self) -> bool:
        return self.num_gpus > 0

    def describe(self) -> str:
        ranks = "1 training rank" if self.num_ranks == 1 else f"{self.num_ranks} training ranks"
        servers = "server" if self.num_servers == 1 else "servers"
        return f"{self.device}: {ranks}, {self.num_servers} {self.kind} {servers}"

    def available_to_step(self, num_params: int) -> int:
        if self.on_gpu:
            return available_bytes(
                self.num_bytes, self._servers_part() if self.num_gpus == 1 else 0
            )
        copies = _COPIES_ON_HOST * _FP32 * num_params
        return max(0, int((1 - _CACHE_ON_HOST) * available_bytes(self.num_bytes)) - copies)

    def num_concurrent(self, model: HFModel, num_params: int, longest: int) -> int:
        """Returns how many completions the caches of embedded servers can hold at once.

        ``longest`` is the length of a prompt with its completion, in tokens.
        """
        args = model.model_args
        itemsize = _FP32 // 2 if self.on_gpu else _FP32
        kv_heads: int = args.n_kv_heads or args.n_heads  # pyright: ignore[reportAttributeAccessIssue]
        layers: int = args.n_layers  # pyright: ignore[reportAttributeAccessIssue]
        of_sequence = 2 * layers * kv_heads * args.head_dim * itemsize * longest
        cache = _CACHE_ON_HOST * self.num_bytes
        if self.on_gpu:
            free = self._servers_part() * self.num_bytes - itemsize * num_params
            cache = _CACHE_ON_GPU * max(free, 0.0)
        return self.num_servers * int(cache // of_sequence)

    def _servers_part(self) -> float:
        return part_beside_training(1, 1, 0.0) if self.num_gpus == 1 else _OF_OWN_GPU


def find_machine() -> Machine:
    """Takes half of several GPUs for servers; one GPU, and a CPU, are shared."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        return Machine(f"{os.cpu_count()} CPU cores, no GPU", host_memory.available_bytes())
    name = torch.cuda.get_device_name(0)
    num_bytes = device_bytes(torch.device("cuda", 0))
    num_servers = max(1, num_gpus // 2)
    num_ranks = max(1, num_gpus - num_servers)
    kind, python = _installed_servers()
    return Machine(
        f"{num_gpus} x {name}", num_bytes, num_gpus, num_ranks, num_servers, kind, python
    )


def _installed_servers() -> tuple[ServerKind, str | None]:
    """Looks in the working folder, and beside the trainer's environment."""
    for row in (KINDS["vllm"], KINDS["sglang"]):
        for folder in (Path(), Path(sys.prefix).parent):
            python = folder / (row.environment or "") / "bin" / "python"
            if os.access(python, os.X_OK):
                return row.name, str(python)
    return "embedded", None


@dataclass(frozen=True)
class StepMemory:
    """What a training step is estimated to need, and what it may fill, in bytes."""

    needed: int
    available: int

    @classmethod
    def of(
        cls, data: dict[str, dict[str, object]], model: HFModel, machine: Machine, num_params: int
    ) -> "StepMemory":
        """``data`` is that of the TOML file."""
        available = machine.available_to_step(num_params)
        config = msgspec.convert(data, type=JobConfig)
        return cls(needed_bytes(config, model, machine.num_ranks, available), available)

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def is_hopeless(self) -> bool:
        """Whether it does not fit even if the estimate is too high by as much as it may be."""
        return self.needed > (1 + _ESTIMATE_ERROR) * self.available

    def describe(self) -> str:
        return f"{self.needed / 2**30:.2f} of {self.available / 2**30:.1f} GiB, by estimate"


def count_parameters(model: HFModel) -> int:
    shapes = parameter_shapes(JobConfig(), model)
    return sum(math.prod(shape) for shape in shapes.values())
