# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes how much memory of a lent GPU a waiting rank leaves to the servers."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchtitan.grpo.config.cluster import lent_groups
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import require
from torchtitan.grpo.inference.gpu_shares import ASLEEP_BYTES, most_on_a_gpu, server_places
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.system.device import num_training_gpus
from torchtitan.grpo.system.strict_json import Found
from torchtitan.grpo.training.memory_choice import ASSUMED_BYTES, device_bytes, estimate, size_text
from torchtitan.grpo.training.memory_estimate import available_bytes
from torchtitan.grpo.training.model_spec import parameter_shapes


@dataclass(frozen=True)
class LentMemory:
    """Who takes how many bytes of a GPU while it is lent. All numbers but ``total`` are estimates.

    Attributes:
        kept: States that the waiting rank keeps. ``parts`` lists them with their sizes.
        left: What the servers on the GPU may take: all but these states and the trainer's reserve.
        weights: The least that the weights of these servers take.
    """

    total: int
    kept: int
    parts: str
    left: int
    weights: int
    num_servers: int

    @property
    def part(self) -> float:
        """The fraction of the GPU's memory that all servers on it may take together, rounded down."""
        return max(math.floor(1000 * self.left / self.total) / 1000, 0.0)


def lent_part(config: JobConfig, model: HFModel) -> float:
    """Returns the fraction of each lent GPU's memory for launched servers, or 0 if no GPU is lent."""
    return _of_this_machine(config, model).part if _lends_gpus(config) else 0.0


def check_lent_memory(config: JobConfig, model: HFModel) -> None:
    """Raises ConfigError if servers cannot fit on the GPUs that are lent to them."""
    if not _lends_gpus(config):
        return
    memory = _of_this_machine(config, model)
    told = (
        f"a GPU of {size_text(memory.total)}, of which a waiting rank is estimated to keep "
        f"{size_text(memory.kept)} ({memory.parts})"
    )
    remedy = (
        "Set optimizer.offload_while_lent = true and, with a reference, grpo.ref_model_offload = "
        "true, or train on more GPUs."
    )
    part = config.inference.gpu_memory_utilization
    require(
        part == 0 or part * memory.num_servers * memory.total <= memory.total - memory.kept,
        f"inference.gpu_memory_utilization = {part:g}, times {memory.num_servers} (the servers on each "
        f"GPU), must fit beside the states of a waiting rank into {told}. Lower it, or leave it at 0. "
        f"{remedy}",
    )
    require(
        part > 0 or memory.weights <= memory.left,
        f"Launched servers must fit beside the states of a waiting rank, which lends its GPU, into {told}. "
        f"Beside the trainer's reserve, {size_text(max(memory.left, 0))} are left, but the weights of "
        f"the servers alone take {size_text(memory.weights)}. {remedy}",
    )


def describe_lent_memory(
    config: JobConfig, model: HFModel, num_ranks: int, found: Found
) -> Iterator[str]:
    if not config.lends_devices:
        return
    num_gpus = num_training_gpus()
    num_bytes = _least_bytes() if num_gpus else ASSUMED_BYTES
    memory = _lent_memory(config, model, num_ranks, num_gpus or num_ranks, num_bytes)
    each = config.inference.gpu_memory_utilization or memory.part / memory.num_servers
    found |= {f"{name}_bytes": getattr(memory, name) for name in ("kept", "left", "weights")}
    found |= {"servers_per_gpu": memory.num_servers, "gpu_memory_utilization": each}
    yield (f"while its device is lent, the rank keeps {size_text(memory.kept)} ({memory.parts})")
    yield (
        f"then {size_text(max(memory.left, 0))} are left for {memory.num_servers} of the servers on "
        f"each GPU, whose weights take at least {size_text(memory.weights)}; "
        f"inference.gpu_memory_utilization is {each:.3f}"
    )
    yield (
        f"while it trains, each sleeping server is assumed to keep {size_text(ASLEEP_BYTES)} of a "
        "GPU, which are not available to the step"
    )


def _lends_gpus(config: JobConfig) -> bool:
    has_gpus = config.inference.device != "cpu" and torch.cuda.device_count() > 0
    return has_gpus and config.lends_devices


def _of_this_machine(config: JobConfig, model: HFModel) -> LentMemory:
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return _lent_memory(config, model, num_ranks, num_training_gpus(), _least_bytes())


def _least_bytes() -> int:
    return min(device_bytes(torch.device("cuda", i)) for i in range(num_training_gpus()))


def _lent_memory(
    config: JobConfig, model: HFModel, num_ranks: int, num_gpus: int, num_bytes: int
) -> LentMemory:
    memory = estimate(config, model, num_ranks)
    offloads = config.optimizer.offload_while_lent
    kept = memory.resting(offloads_optimizer=offloads)
    parts = f"parameters {size_text(memory.parameters)}"
    parts += ", optimizer offloaded" if offloads else f", optimizer {size_text(memory.optimizer)}"
    parts += f", reference {size_text(memory.reference)}" if memory.reference else ""
    if memory.critic:
        states = memory.critic // 2 + (0 if offloads else memory.critic_optimizer)
        parts += f", critic {size_text(states)}"
    places = server_places(lent_groups(config), num_gpus, num_gpus)
    num_servers = most_on_a_gpu(places)
    itemsize = 4 if config.inference.dtype == "float32" else 2
    of_model = sum(math.prod(shape) for shape in parameter_shapes(config, model).values())
    # A server shards its weights over at most all of its GPUs.
    gpus_of_server = max(map(len, places))
    return LentMemory(
        total=num_bytes,
        kept=kept,
        parts=parts,
        left=available_bytes(num_bytes) - kept,
        weights=num_servers * itemsize * of_model // gpus_of_server,
        num_servers=num_servers,
    )
