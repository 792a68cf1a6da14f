# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses what FSDP keeps unsharded between microbatches, and describes the memory of a training step."""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from torchtitan.grpo.config.cluster import count_servers, lent_groups, server_groups
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.inference.gpu_shares import (
    ASLEEP_BYTES,
    most_on_a_gpu,
    part_beside_training,
    server_places,
)
from torchtitan.grpo.models.fsdp import Kept
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.system.device import num_training_gpus
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.system.strict_json import Found
from torchtitan.grpo.training.memory_estimate import (
    CHECKPOINTING,
    TrainingMemory,
    available_bytes,
    checkpoint_mode,
    estimate_memory,
    microbatch_tokens,
)
from torchtitan.grpo.training.model_spec import parameter_shapes

_MIB, _GIB = 1024**2, 1024**3
_NARROW = 0.95  # part of the available memory from which on the error of the estimate counts
ASSUMED_BYTES = 79 * _GIB
"""Memory of a GPU of 80 GB by CUDA; a dry run without a GPU assumes it."""


def resolve_kept(config: JobConfig, model: HFModel, device: torch.device) -> None:
    """Replaces ``auto`` in ``parallelism.fsdp_between_microbatches`` of ``config``. Collective.

    The device with the least memory decides for all ranks.
    """
    settings = config.parallelism
    if settings.fsdp_between_microbatches != "auto":
        return
    num_bytes = torch.tensor(device_bytes(device), device=device)
    dist.all_reduce(num_bytes, dist.ReduceOp.MIN)
    memory = estimate(config, model, dist.get_world_size())
    available = available_bytes(int(num_bytes), _servers_share(config, int(num_bytes)))
    settings.fsdp_between_microbatches = kept = choose_kept(config, memory, available)
    if dist.get_rank() == 0:
        needed = memory.total(checkpoint_mode(config), microbatch_tokens(config), kept)
        logger.info(
            f"Between microbatches: {kept} (parallelism.fsdp_between_microbatches = 'auto'); a "
            f"training step is estimated to need {size_text(needed)} of {size_text(available)}"
        )


def describe_memory(config: JobConfig, model: HFModel, ranks: int, found: Found) -> Iterator[str]:
    has_gpu = torch.cuda.is_available()
    num_bytes = device_bytes(torch.device("cuda", 0)) if has_gpu else ASSUMED_BYTES
    available = available_bytes(num_bytes, _servers_share(config, num_bytes))
    memory = estimate(config, model, ranks)
    mode, tokens = checkpoint_mode(config), microbatch_tokens(config)
    asked = config.parallelism.fsdp_between_microbatches
    kept: Kept = choose_kept(config, memory, available) if asked == "auto" else asked
    of_what = (
        "this GPU" if has_gpu else "a GPU of 80 GB, which is assumed because there is none here"
    )
    yield f"{size_text(available)} of {of_what} are available to the step, the rest is reserved"
    reference = f", reference {size_text(memory.reference)}" if memory.reference else ""
    if memory.critic:
        reference += f", critic {size_text(memory.critic + memory.critic_optimizer)}"
    whole = (
        f", whole parameters {size_text(memory.whole_parameters)}" if memory.always_whole else ""
    )
    yield (
        f"parameters {size_text(memory.parameters)}, gradients {size_text(memory.gradients)}, optimizer "
        f"{size_text(memory.optimizer)}{reference}{whole}, buffers {size_text(memory.working)}"
    )
    yield (
        f"between microbatches (parallelism.fsdp_between_microbatches = {asked!r}): {kept}; "
        f"keep_parameters adds {size_text(memory.kept('keep_parameters'))} to the peak, keep_all "
        f"{size_text(memory.kept('keep_all'))}"
    )
    # The most tokens are those with which `auto` keeps the least.
    least: Kept = choose_kept(config, memory, 0) if asked == "auto" else asked
    for name in CHECKPOINTING:
        option = config.activation_checkpoint.selective_ac_option
        label = f"{name} ({option})" if name == "selective" else name
        again = memory.recomputed[name]
        yield (
            f"activation_checkpoint.mode {label}: {memory.per_token[name] / 1024:.1f} KiB a token, "
            f"microbatches of at most {memory.largest_microbatch(name, least, available):,} tokens, "
            + (f"{100 * again:.0f} % more FLOPs" if again else "nothing is recomputed")
        )
    needed = memory.total(mode, tokens, kept)
    found |= {f"{key}_bytes": size for key, size in vars(memory).items() if type(size) is int}
    found |= {"needed_bytes": needed, "available_bytes": available, "fits": needed <= available}
    fits = "fit" if needed <= available else "do NOT fit"
    if _NARROW * available < needed <= available:
        fits = "fit narrowly: the estimate may be wrong by a tenth"
    configured = f"mode = {config.activation_checkpoint.mode!r}"
    if mode != config.activation_checkpoint.mode:
        configured += f" (estimated as {mode!r}, which needs the most)"
    yield (
        f"configured: {tokens:,} tokens in a microbatch (rows of training.seq_len = "
        f"{config.training.seq_len}) and {configured} need {size_text(needed)}, which {fits}"
    )


def needed_bytes(config: JobConfig, model: HFModel, num_ranks: int, available: int) -> int:
    """Returns the estimated bytes that a step needs on a rank where it may fill ``available`` bytes."""
    memory = estimate(config, model, num_ranks)
    kept = choose_kept(config, memory, available)
    return memory.total(checkpoint_mode(config), microbatch_tokens(config), kept)


def estimate(config: JobConfig, model: HFModel, num_ranks: int) -> TrainingMemory:
    return estimate_memory(config, parameter_shapes(config, model), model.model_args, num_ranks)


def choose_kept(config: JobConfig, memory: TrainingMemory, available: int) -> Kept:
    if config.parallelism.fsdp_reshard_after_forward == "always":
        return "free"
    if config.parallelism.pipeline_parallel_degree > 1:
        return "keep_all"
    return memory.choose_kept(checkpoint_mode(config), microbatch_tokens(config), available)


def device_bytes(device: torch.device) -> int:
    """Returns the size of a GPU's memory or, without a GPU, this rank's share of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _servers_share(config: JobConfig, num_bytes: int) -> float:
    """Returns the fraction of a GPU with ``num_bytes`` that inference servers occupy while ranks train."""
    groups = server_groups(config)
    num_gpus, num_training = torch.cuda.device_count(), num_training_gpus()
    if not (config.has_servers and groups and num_gpus):
        return 0.0
    if lent := lent_groups(config):
        places = server_places(lent, num_gpus, num_training)
        return most_on_a_gpu(places) * ASLEEP_BYTES / num_bytes
    if num_training < num_gpus:
        return 0.0
    part = config.inference.gpu_memory_utilization
    return part_beside_training(count_servers(groups), num_gpus, part)


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"
