# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The resolved configuration and its plan as text, for ``--dry-run`` and ``check-config``."""

from typing import Any

from torchtitan.grpo.config_checks.layout import describe_layout
from torchtitan.grpo.inference.registry import registry_folder
from torchtitan.grpo.inference.urls import named_urls
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.upstream.configuration import job_config


def describe_settings(config: JobConfig) -> str:
    """Returns the resolved configuration in lines like TOML.

    A default that this project has changed names torchtitan's behind it.
    """
    changed = changed_defaults()
    lines = []
    for table, values in config.to_dict().items():
        lines.append(f"[{table}]")
        for key, value in values.items():
            here, upstream = changed.get(f"{table}.{key}", (None, None))
            is_default = f"{table}.{key}" in changed and value == here
            note = f"  # the default here; torchtitan's is {upstream!r}" if is_default else ""
            lines.append(f"{key} = {value!r}{note}")
        lines.append("")
    return "\n".join(lines)


def describe_plan(config: JobConfig) -> str:
    """Returns the planned layout, the batch and the servers, in lines."""
    lines = [
        "Layout",
        f"  ranks: {describe_layout(config)}",
        f"  global batch: {_describe_batch(config)}, packed into rows of "
        f"{config.training.seq_len} tokens",
    ]
    if config.sft.path is None:
        staleness = config.rollout.max_head_offpolicyness
        lines.append(f"  staleness: at most {staleness} {'step' if staleness == 1 else 'steps'}")
    lines.append(f"  servers: {_describe_servers(config)}")
    if config.teacher.urls:
        teacher = config.teacher
        lines.append(
            f"  teacher: {teacher.kind} at {', '.join(teacher.urls)}, coef {teacher.coef:g}"
            + (f", top_k {teacher.top_k}" if teacher.top_k else "")
        )
    return "\n".join(lines)


def _describe_batch(config: JobConfig) -> str:
    if config.sft.path is not None:
        return f"{config.sft.examples_per_step} examples"
    num_prompts, size = config.grpo.prompts_per_step, config.grpo.group_size
    return f"{num_prompts} prompts x {size} rollouts = {num_prompts * size}"


def changed_defaults() -> dict[str, tuple[Any, Any]]:
    """Returns this project's default and torchtitan's, for each of torchtitan's keys that differs.

    ``[model]`` is left out: a Hugging Face directory determines the model here.
    """
    here, upstream = JobConfig().to_dict(), job_config.JobConfig().to_dict()
    return {
        f"{table}.{key}": (here[table][key], value)
        for table, values in upstream.items()
        if table != "model"
        for key, value in values.items()
        if here[table][key] != value
    }


def _describe_servers(config: JobConfig) -> str:
    if config.sft.path is not None:
        return f"none, the run is trained on the examples of {config.sft.path}"
    if config.rollout.replay is not None:
        return f"none, rollouts are replayed from {config.rollout.replay}"
    inference = config.inference
    if inference.launch:
        return f"{inference.num_servers} x {inference.kind}, launched on this machine"
    if folder := registry_folder(inference, config.job.dump_folder):
        return f"{inference.kind} servers that register themselves in {folder}"
    source = f" ({inference.urls_file})" if inference.urls_file else ""
    return f"{inference.kind} at {', '.join(named_urls(inference))}{source}"
