# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Turns long error texts of torch into one short message that names the settings that help."""

import os
import re
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.attention_choice import choose_packed_attention
from torchtitan.grpo.pipeline.schedules import SCHEDULES
from torchtitan.grpo.pipeline.stages import trains_together
from torchtitan.grpo.system.disk_failures import disk_failure
from torchtitan.grpo.system.functions import chain_of

# How torch, its CPU allocator, cuBLAS and NCCL say it. Only CUDA's caching allocator has a type.
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED")
# From here on the dense mask of a row takes more than 64 MiB.
_LONG_ROW_TOKENS = 8192


def known_failure(error: BaseException, config: JobConfig) -> str | None:
    for cause in chain_of(error):
        if isinstance(cause, MemoryError | torch.OutOfMemoryError) or (
            isinstance(cause, RuntimeError) and _OUT_OF_MEMORY.search(str(cause))
        ):
            return _out_of_memory(cause, config)
        wrapped = [failure[0] for failure in getattr(cause, "failures", {}).values()]
        for one in (cause, *wrapped):
            if message := disk_failure(one, config.job.dump_folder):
                return message
        if isinstance(cause, CheckpointException):
            return _unfit_checkpoint(cause, config)
    return None


def _out_of_memory(error: BaseException, config: JobConfig) -> str:
    text = str(error)
    on_gpu = isinstance(error, torch.OutOfMemoryError) or "CUDA" in text or "CUBLAS" in text
    asked = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
    free = re.search(r"of which ([\d.]+ \w+) is free", text)
    what = f" when {_in_gib(asked[1])} were asked for" if asked else ""
    what += f" and {free[1]} were free" if free else ""
    (key, rows), tokens = _rows_at_once(config), config.training.seq_len
    return (
        f"Rank {os.environ.get('RANK', '0')} ran out of {'GPU' if on_gpu else 'host'} memory{what}. It "
        f"trains on {key} = {rows} rows of training.seq_len = {tokens} tokens at a time. "
        f"What needs less: {'; '.join(_remedies(config, on_gpu))}."
    )


def _rows_at_once(config: JobConfig) -> tuple[str, int]:
    settings = config.parallelism
    if settings.pipeline_parallel_degree > 1:
        size = settings.pipeline_parallel_microbatch_size
        return "parallelism.pipeline_parallel_microbatch_size", size
    return "training.local_batch_size", config.training.local_batch_size


def _remedies(config: JobConfig, on_gpu: bool) -> Iterator[str]:
    grpo, training = config.grpo, config.training
    key, rows = _rows_at_once(config)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if rows > 1:
        yield f"{key} below {rows}, with the same result"
    if config.parallelism.pipeline_parallel_degree > 1:
        yield from _pipeline_remedies(config)
    elif (kept := config.parallelism.fsdp_between_microbatches) != "free" and num_ranks > 1:
        yield f"parallelism.fsdp_between_microbatches = 'free' (it is {kept!r})"
    if config.activation_checkpoint.mode != "full":
        yield f"activation_checkpoint.mode = 'full' (it is {config.activation_checkpoint.mode!r})"
    if grpo.logprob_keep_logits:
        yield "grpo.logprob_keep_logits = false"
    device = "cuda" if on_gpu else "cpu"
    attention = choose_packed_attention(config, device)
    if attention == "sdpa" and training.seq_len >= _LONG_ROW_TOKENS:
        yield "a shorter training.seq_len: the mask of attention grows with its square"
    else:
        yield "a shorter training.seq_len, with rollout.max_new_tokens"
    if on_gpu and grpo.kl_coef > 0 and not grpo.ref_model_offload:
        yield "grpo.ref_model_offload = true"
    if on_gpu:
        yield (
            "more ranks, with parallelism.tensor_parallel_degree or context_parallel_degree if one "
            "row is too much; less memory for a server on the same GPU (vLLM's "
            "--gpu-memory-utilization, SGLang's --mem-fraction-static)"
        )
    else:
        yield "more ranks on further hosts, or other programs ended"


def _pipeline_remedies(config: JobConfig) -> Iterator[str]:
    schedule = SCHEDULES[config.parallelism.pipeline_parallel_schedule]
    if config.grpo.recompute_early_blocks not in (0, 1):
        yield "grpo.recompute_early_blocks = 1"
    if schedule.is_zero_bubble and config.grpo.max_pending_weight_grads_gib != 0:
        yield "a smaller grpo.max_pending_weight_grads_gib (0 keeps nothing for later)"
    takes_chunks = (
        config.activation_checkpoint.mode == "full"
        and config.parallelism.tensor_parallel_degree == 1
    )
    if schedule.divides_layers and takes_chunks and config.grpo.pipeline_chunk_tokens == 0:
        yield "grpo.pipeline_chunk_tokens, which computes the feed-forward layers in parts"
    if trains_together(config):
        yield "grpo.pipeline_fill_gaps = false, which trains the policy and the critic one after the other"
    if schedule.name not in ("VHalf", "VMin"):
        yield 'parallelism.pipeline_parallel_schedule = "VHalf", which holds fewer microbatches'


def _in_gib(amount: str) -> str:
    number, unit = amount.split()
    return f"{float(number) / 2**30:.3g} GiB" if unit == "bytes" else amount


def _unfit_checkpoint(error: CheckpointException, config: JobConfig) -> str:
    cause = next(wrapped[0] for wrapped in error.failures.values())
    reason = str(cause).strip() or type(cause).__name__  # an assertion may have no text
    settings = config.checkpoint
    folder = settings.initial_load_path or os.path.join(config.job.dump_folder, settings.folder)
    key = "checkpoint.initial_load_path" if settings.initial_load_path else "job.dump_folder"
    return (
        f"The checkpoint in {folder} ({key}) does not fit the model of model.hf_assets_path "
        f"({config.model.hf_assets_path}): {reason.splitlines()[0]} It is another model's, or "
        f"incomplete. Resume with the model that the run was begun with, or choose another {key}."
    )
