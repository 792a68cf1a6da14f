# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the output of a run, and its guards."""

import os
from pathlib import PurePath

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import refusing, require
from torchtitan.grpo.inference.urls import checked_host
from torchtitan.grpo.system.monitoring.addresses import KEY_VARIABLE
from torchtitan.grpo.system.network import is_loopback


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


_ACTING = ("skip", "stop")


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
