# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the trainer: checkpoints, optimizer, guards, output, and the needs of machine and model."""

import os
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from torchtitan.grpo.config.job_config import JobConfig, Optimizer
from torchtitan.grpo.config_checks.layout import (
    check_fill_jobs,
    layout_problems,
    model_layout_problems,
)
from torchtitan.grpo.config_checks.lora import model_lora_problems
from torchtitan.grpo.config_checks.rollouts import longest_sequence
from torchtitan.grpo.config_checks.rules import ConfigError, refusing, require
from torchtitan.grpo.inference.urls import checked_host
from torchtitan.grpo.models.hub import is_hub_name
from torchtitan.grpo.system.monitoring.addresses import KEY_VARIABLE
from torchtitan.grpo.system.network import is_loopback

if TYPE_CHECKING:
    from torchtitan.grpo.models.hf_config import HFModel

_ACTING = ("skip", "stop")  # what a guard does to the run


def check_checkpoints(config: JobConfig) -> None:
    if not config.checkpoint.enable:
        return
    require(
        config.checkpoint.keep_latest_k != 1,
        "checkpoint.keep_latest_k must be 0 (all) or at least 2, because a checkpoint is removed only "
        "once a newer one is whole, got 1. Set 2.",
    )
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        # Imported here, because torch takes seconds.
        import torch

        require(
            torch.cuda.is_available(),
            'checkpoint.async_mode = "async_with_pinned_mem" needs a GPU, and none is visible. Set '
            'checkpoint.async_mode = "async", which writes on a thread.',
        )


def check_optimizer(config: JobConfig) -> None:
    optimizer: Optimizer = config.optimizer
    if optimizer.name != "Muon":
        return
    require(
        optimizer.muon_adjust_lr != "original" or optimizer.muon_lr > 0,
        "optimizer.muon_lr must be set with optimizer.muon_adjust_lr = 'original', whose updates are "
        f"not as large as AdamW's, so that optimizer.lr ({optimizer.lr:g}) would not fit both. Set "
        "optimizer.muon_lr, or take 'match_rms_adamw'.",
    )


def check_machine(config: JobConfig) -> None:
    grpo = config.grpo
    if grpo.packed_attention == "flex":
        import torch

        require(
            torch.cuda.is_available(),
            "grpo.packed_attention = 'flex' needs a CUDA GPU, and none is visible. Use 'auto' or "
            "'sdpa'.",
        )
    _check_varlen(config)
    path = grpo.ref_model_path
    require(
        grpo.kl_coef <= 0 or path is None or Path(path).is_dir() or is_hub_name(path),
        "grpo.ref_model_path must be a Hugging Face model directory, or a name on the Hub "
        f"(grpo.kl_coef is above 0), got {path}.",
    )


def _check_varlen(config: JobConfig, model: "HFModel | None" = None) -> None:
    if config.grpo.packed_attention == "varlen":
        from torchtitan.grpo.models.attention_choice import varlen_problem

        problem = varlen_problem(config, model.model_args.head_dim if model else None)
        require(problem is None, f"grpo.packed_attention = 'varlen' needs {problem}. Use 'auto'.")


def check_layout(config: JobConfig) -> None:
    for problem in layout_problems(config):
        raise ConfigError(problem)
    with refusing():
        check_fill_jobs(config)


def check_model(config: JobConfig, model: "HFModel") -> None:
    needed = longest_sequence(config)
    if config.inference.launch and config.has_servers:
        needed = config.inference.max_model_len or config.training.seq_len
    limit = model.max_position_embeddings
    require(
        limit == 0 or needed <= limit,
        f"Sequences must be at most {limit} tokens long (max_position_embeddings of "
        f"{model.path}), got {needed}. Lower training.seq_len; or, to pack short sequences into "
        "longer rows, set prompts.max_prompt_tokens and inference.max_model_len.",
    )
    if config.grpo.ptx_path is not None:
        needed = max(needed, config.training.seq_len)
    require(
        model.window is None or needed <= model.window,
        f"Sequences must be at most {model.window} tokens long (sliding_window in "
        f"{model.path / 'config.json'}), because attention over all tokens is trained, got {needed}. Lower "
        "training.seq_len and inference.max_model_len; or, to pack short sequences into longer rows, "
        "set prompts.max_prompt_tokens and inference.max_model_len.",
    )
    _check_varlen(config, model)
    for problem in (*model_layout_problems(config, model), *model_lora_problems(config, model)):
        raise ConfigError(problem)


def check_observe(config: JobConfig) -> None:
    observe = config.observe
    require(
        observe.print_samples <= observe.samples_per_step,
        f"observe.print_samples must be at most observe.samples_per_step "
        f"({observe.samples_per_step}), since samples that are written are printed, got "
        f"{observe.print_samples}. Raise observe.samples_per_step.",
    )
    if observe.monitor:
        with refusing(
            "observe.monitor_host must be an address of this host, without scheme, brackets and "
            f"port (observe.monitor_port), got {observe.monitor_host!r}"
        ):
            checked_host(observe.monitor_host)
    require(
        not observe.monitor
        or is_loopback(observe.monitor_host)
        or bool(os.environ.get(KEY_VARIABLE)),
        f"observe.monitor_host = {observe.monitor_host!r} lets other hosts read the metrics, which "
        f"needs a key in the environment variable {KEY_VARIABLE}, got none. Set it, or leave "
        "observe.monitor_host at 127.0.0.1.",
    )


def check_profiling(config: JobConfig) -> None:
    settings = config.profiling
    if not settings.enable_profiling and not settings.enable_memory_snapshot:
        return
    needed = 1
    if settings.enable_profiling:
        needed = settings.profiler_warmup + settings.profiler_active
    require(
        settings.profile_freq >= needed,
        f"profiling.profile_freq must be at least {needed} (with profiling.enable_profiling: "
        "profiling.profiler_warmup + profiling.profiler_active), because it counts the steps from one "
        f"profile to the next, got {settings.profile_freq}. Raise it, or lower the others.",
    )
    for key in ("save_traces_folder", "save_memory_snapshot_folder"):
        path = PurePath(folder := getattr(settings, key))
        require(
            bool(path.name) and not path.is_absolute() and ".." not in path.parts,
            f"profiling.{key} must name a folder within job.dump_folder, got {folder!r}.",
        )
    if settings.enable_memory_snapshot:
        import torch  # takes seconds

        require(
            torch.cuda.is_available() or torch.xpu.is_available(),
            "profiling.enable_memory_snapshot needs a GPU, because torch records the memory of GPUs "
            "alone, and none is visible. Remove it; profiling.enable_profiling works on a CPU.",
        )


def check_guards(config: JobConfig) -> None:
    guards = config.guards
    require(
        guards.grad_norm not in _ACTING or guards.grad_norm_factor > 0,
        f"guards.grad_norm = {guards.grad_norm!r} needs guards.grad_norm_factor above 0, got 0. Set it.",
    )
    require(
        guards.equal_rewards not in _ACTING or config.observe.equal_rewards_steps > 0,
        f"guards.equal_rewards = {guards.equal_rewards!r} acts after observe.equal_rewards_steps "
        "batches, got 0, which is off. Set observe.equal_rewards_steps.",
    )
