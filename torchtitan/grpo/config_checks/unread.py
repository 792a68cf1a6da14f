# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Refuses settings that would be ignored. A setting at its default counts as not set."""

from collections.abc import Callable

from torchtitan.grpo.config import SECRETS
from torchtitan.grpo.config.cluster import lent_groups
from torchtitan.grpo.config.environments import environments_of, own_key
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import get, require

_Condition = tuple[Callable[[JobConfig], bool], str]
"""The truth of a condition, and its words in a message."""


def _is(key: str, *values: object, why: str = "") -> _Condition:
    words = (
        f"{', '.join(map(repr, values[:-1]))} or {values[-1]!r}" if values[1:] else repr(*values)
    )
    return lambda config: get(config, key) in values, f"{key} = {words}{why}"


def _on(key: str) -> _Condition:
    return lambda config: get(config, key), f"{key} = true"


def _above(key: str, limit: int, why: str = "") -> _Condition:
    return lambda config: get(config, key) > limit, f"{key} above {limit}{why}"


def _given(key: str) -> _Condition:
    return lambda config: get(config, key) not in (None, []), key


def _not_off(key: str) -> _Condition:
    return lambda config: get(config, key) != "off", f"{key} other than 'off'"


def _both(first: _Condition, second: _Condition) -> _Condition:
    return lambda c: first[0](c) and second[0](c), f"{first[1]} and {second[1]}"


_HAS_AGENT: _Condition = (lambda config: config.agent.is_used, "agent.command or agent.function")
_HAS_TURNS: _Condition = (
    lambda config: config.agent.is_used or config.rollout.environment is not None,
    "rollout.environment, agent.command or agent.function",
)
_RATED: _Condition = (
    lambda config: config.may_be_taught,
    "teacher.urls, or rated rollouts in rollout.replay",
)
_LENDS: _Condition = (
    lambda config: bool(lent_groups(config)),
    "inference.lend = true, or a table in [cluster] with the tags 'train' and 'rollout'",
)

_READ_WITH: dict[str, dict[_Condition, tuple[str, ...]]] = {
    "grpo": {
        _above("grpo.kl_coef", 0): (
            *("ref_model_path", "ref_model_ema", "ref_model_offload", "kl_in", "kl_estimator"),
        ),
        _above("grpo.overlong_buffer", 0): ("overlong_penalty",),
        _is("grpo.old_policy", "step_start"): (
            *("mismatch_level", "importance_cap", "importance_floor"),
        ),
        _is("grpo.mismatch_correction", "truncate", "mask"): (
            *("importance_cap", "importance_floor"),
        ),
        _given("grpo.ptx_path"): ("ptx_coef", "ptx_per_step"),
    },
    "parallelism": {_above("parallelism.pipeline_parallel_degree", 1): ("pipeline_fill_jobs",)},
    "critic": {
        _is("grpo.advantage", "gae"): (
            *("path", "lr", "gamma", "gae_lambda"),
            *("whiten", "value_clip", "warmup_steps", "level"),
        ),
    },
    "optimizer": {
        _is("optimizer.name", "Muon"): (*("muon_lr", "muon_adjust_lr", "muon_dtype"),),
        _LENDS: ("offload_while_lent",),
    },
    "rollout": {
        _on("rollout.dynamic_sampling"): ("dynamic_sampling_limit",),
        _above(
            "rollout.max_head_offpolicyness", 0, " (in synchronous training no group can wait)"
        ): ("overdue",),
        _on("rollout.stream"): ("stream_parts",),
        _given("rollout.environment"): (
            *("environment_options", "environment_timeout_seconds", "environment_workers"),
        ),
        _HAS_TURNS: ("max_turns", "earlier_turns"),
    },
    "agent": {
        _given("agent.function"): ("workers", "options"),
        _HAS_AGENT: ("timeout_seconds", "allow_sampling", "host"),
    },
    "sft": {
        _given("sft.path"): (
            *("examples_per_step", "max_example_tokens", "held_out_path", "held_out_interval"),
        ),
        _given("sft.held_out_path"): ("held_out_interval",),
    },
    "teacher": {
        _given("teacher.urls"): (
            *("kind", "model_path", "max_concurrent_requests", "request_timeout_seconds"),
            *("wait_seconds", "api_key"),
        ),
        _RATED: ("coef", "top_k", "max_divergence"),
    },
    "inference": {
        _on("inference.launch"): ("lend",),
        _LENDS: ("sleep_timeout_seconds",),
        _both(_on("inference.launch"), _is("inference.kind", "vllm", "sglang")): (
            *("tensor_parallel_size", "gpu_memory_utilization"),
        ),
    },
    "weight_sync": {
        _is("weight_sync.transport", "auto", "nccl", "host"): ("master_address", "delta"),
        _is("weight_sync.transport", "disk"): ("disk_path",),
    },
    "guards": {
        _not_off("guards.grad_norm"): ("grad_norm_factor",),
        _not_off("guards.entropy"): ("entropy_floor",),
        _not_off("guards.mismatch_kl"): ("mismatch_kl_limit",),
        _not_off("guards.unscored"): ("unscored_limit",),
    },
    "lora": {_above("lora.rank", 0): ("alpha", "target_modules", "base_dtype", "push")},
}
"""For each table, conditions and the keys of the table that are read only if they hold."""


def check_unread(config: JobConfig) -> None:
    """Refuses settings of the run that no environment reads, and settings of an environment that it ignores."""
    owns = environments_of(config)
    for name, conditions in _READ_WITH.items():
        if name == "inference" and not config.has_servers:
            continue  # a file may name servers for later runs
        for (holds, needed), keys in conditions.items():
            reads = {environment: holds(own) for environment, own in owns.items()}
            for key in () if any(reads.values()) else keys:
                _check_default(getattr(config, name), f"{name}.{key}", needed)
            for environment in (e for e in config.environments if not reads[e]):
                given = config.environments[environment].get(name, {})
                for key in (key for key in keys if key in given):
                    table = getattr(owns[environment], name)
                    _check_default(table, own_key(environment, f"{name}.{key}"), needed)


def _check_default(table: object, key: str, needed: str) -> None:
    name = key.rpartition(".")[2]
    value, default = getattr(table, name), getattr(type(table)(), name)
    shown = "a value" if tuple(key.split(".")) in SECRETS else repr(value)
    require(
        value == default,
        f"{key} needs {needed}, got {shown}, which nothing would read. Set what it needs, or "
        f"leave {key} at its default, {default!r}.",
    )
