# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads, merges and checks a run's configuration.

Command line over TOML over defaults, as in torchtitan, whose tables and command line
parser are used. Added to that: a misspelt key names the nearest valid one, a value of the
wrong type is refused with its key, and contradictions are found here, before any process
group exists. Nothing in this module needs a device.
"""

import contextlib
import difflib
import io
import os
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from torchtitan.config import ConfigManager, job_config

from torchtitan.grpo import config as grpo_config
from torchtitan.grpo.inference.urls import checked_urls, named_urls
from torchtitan.grpo.layout_check import describe_layout, layout_problems, model_layout_problems

if TYPE_CHECKING:
    from torchtitan.grpo.models.hf_config import HFModel


class ConfigError(ValueError):
    """The configuration cannot be used; the message says which key, and what to do."""


@dataclass
class Model(job_config.Model):
    """``[model]``: torchtitan's table; a Hugging Face directory says the rest."""

    name: str = "huggingface"
    """Always ``huggingface``: the architecture is read from ``hf_assets_path``."""

    flavor: str = "directory"
    """Always ``directory``: sizes are read from ``hf_assets_path``."""

    hf_assets_path: str = ""
    """Hugging Face directory with config.json, tokenizer.json and safetensors. Required."""


@dataclass
class JobConfig(job_config.JobConfig):
    """Torchtitan's tables and those of `torchtitan/grpo/config.py`."""

    model: Model = field(default_factory=Model)
    grpo: grpo_config.GRPO = field(default_factory=grpo_config.GRPO)
    prompts: grpo_config.Prompts = field(default_factory=grpo_config.Prompts)
    rollout: grpo_config.Rollout = field(default_factory=grpo_config.Rollout)
    inference: grpo_config.Inference = field(default_factory=grpo_config.Inference)
    weight_sync: grpo_config.WeightSync = field(default_factory=grpo_config.WeightSync)
    reward: grpo_config.Reward = field(default_factory=grpo_config.Reward)
    evaluation: grpo_config.Evaluation = field(default_factory=grpo_config.Evaluation)
    observe: grpo_config.Observe = field(default_factory=grpo_config.Observe)

    def to_dict(self) -> dict[str, Any]:
        """What is printed, logged and saved of a configuration: keys are masked."""
        values = super().to_dict()
        for name in ("api_key", "admin_key"):
            if values["inference"][name]:
                values["inference"][name] = "***"
        return values


class GRPOConfigManager(ConfigManager):
    """Torchtitan's manager with stricter reading of the TOML file."""

    def __init__(self) -> None:
        super().__init__(config_cls=JobConfig)

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        try:
            values = super()._maybe_load_toml(args)
        except FileNotFoundError as error:
            raise ConfigError(f"--job.config_file must exist, got {error.filename}.") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--job.config_file is not valid TOML: {error}.") from error
        return values

    def _maybe_add_custom_config(self, args: list[str], toml_values: dict[str, Any] | None) -> type:
        cls = super()._maybe_add_custom_config(args, toml_values)
        check_arguments(cls, args)
        return cls

    def _dict_to_dataclass(self, cls, data: dict[str, Any]) -> Any:
        check_keys(cls, data)
        try:
            return msgspec.convert(data, type=cls)
        except msgspec.ValidationError as error:
            message = re.sub(r"`\$\.(.*)`", r"\1", str(error))
            raise ConfigError(f"{message}. Change the value in the TOML file.") from error

    def _validate_config(self) -> None:
        """Upstream's checks are about its own assets; ours stand in :func:`validate`."""


def load_config(args: list[str]) -> JobConfig:
    """Parses command line and TOML, and checks the result.

    Raises:
        ConfigError: With one clear message.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = GRPOConfigManager().parse_args(args)
    except SystemExit as error:
        if error.code in (0, None):  # --help
            raise
        raise ConfigError(_unboxed(said.getvalue())) from error
    sys.stderr.write(said.getvalue())
    assert isinstance(config, JobConfig)
    validate(config)
    return config


def _unboxed(text: str) -> str:
    """The message that tyro drew a box around: between the title and the help text."""
    lines = " ".join(line.strip("│╭╮╰╯ ") for line in text.splitlines())
    title, *paragraphs = re.split(r"[─-]{4,}", lines)
    message = (paragraphs or [title])[0].strip(" .")
    return f"{message}. Change it on the command line."


def check_arguments(cls: type, args: list[str]) -> None:
    """Refuses ``--table.key`` arguments that no table has, naming the nearest key.

    Both spellings (``-`` and ``_``), ``--key=value`` and ``--table.no-flag`` are known.
    """
    known = _all_keys(cls)
    for arg in args:
        given = arg.partition("=")[0]
        if not given.startswith("--") or given == "--help" or given.startswith("--tyro-"):
            continue
        key = given[2:].replace("-", "_")
        table, _, name = key.rpartition(".")
        if key in known or f"{table}.{name.removeprefix('no_')}" in known:
            continue
        if key.startswith("no_") and key.removeprefix("no_") in known:
            flag_table, _, flag = given[len("--no-") :].rpartition(".")
            raise ConfigError(f"Unknown argument {given}. Did you mean --{flag_table}.no-{flag}?")
        siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == table}
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
        hint = f"Did you mean --{siblings[near[0]]}?" if near else _elsewhere(key, known)
        raise ConfigError(f"Unknown argument {given}. {hint}")


def check_keys(cls: type, data: dict[str, Any], prefix: str = "") -> None:
    """Refuses keys that no table has, naming the nearest that one has."""
    known = {f.name: f for f in fields(cls)}
    for key, value in data.items():
        if key not in known:
            everywhere = _all_keys(JobConfig)
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"Did you mean {prefix}{near[0]}?" if near else _elsewhere(key, everywhere)
            raise ConfigError(f"Unknown key {prefix}{key} in the TOML file. {hint}")
        table = known[key].type
        if isinstance(table, type) and is_dataclass(table) and isinstance(value, dict):
            check_keys(table, value, f"{prefix}{key}.")


def _elsewhere(key: str, keys: list[str]) -> str:
    same_name = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
    if same_name:
        near = difflib.get_close_matches(key, same_name, n=1, cutoff=0.0)
        return f"There is {near[0]}: is it in the wrong table?"
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
    return f"The nearest key is {near[0]}."


def _all_keys(cls: type, prefix: str = "") -> list[str]:
    keys = []
    for f in fields(cls):
        if isinstance(f.type, type) and is_dataclass(f.type):
            keys += _all_keys(f.type, f"{prefix}{f.name}.")
        else:
            keys.append(prefix + f.name)
    return keys


def validate(config: JobConfig) -> None:
    """Refuses what cannot work, with the keys that contradict each other.

    Raises:
        ConfigError: The first problem found.
    """
    for check in (
        _check_required,
        _check_refused,
        _check_ranges,
        _check_losses,
        _check_lengths,
        _check_data,
        _check_machine,
        _check_inference,
        _check_weight_sync,
        _check_layout,
    ):
        check(config)


def _check_required(config: JobConfig) -> None:
    _require(
        bool(config.model.hf_assets_path),
        "model.hf_assets_path must name a Hugging Face model directory, got nothing.",
    )
    _require(
        (config.model.name, config.model.flavor) == ("huggingface", "directory"),
        f"model.name and model.flavor are not used: the model is read from "
        f"model.hf_assets_path. Remove them (got {config.model.name!r}, {config.model.flavor!r}).",
    )
    if config.rollout.replay is not None:
        return  # nothing is asked or scored
    _require(bool(config.prompts.path), "prompts.path must name the prompts, got nothing.")
    _require(
        bool(config.reward.functions), "reward.functions must name at least one function, got none."
    )
    weights = config.reward.weights
    _require(
        not weights or len(weights) == len(config.reward.functions),
        f"reward.weights must have one entry for each of the {len(config.reward.functions)} "
        f"reward.functions, got {len(weights)}.",
    )


_REFUSED = {
    "validation.enable": "held-out prompts are decoded and scored by [evaluation]",
    "checkpoint.create_seed_checkpoint": "a run begins with the weights of model.hf_assets_path",
    "training.enable_cpu_offload": "weights are pushed from the device that they are trained on",
    "memory_estimation.enable": "only torchtitan's own estimation script reads it",
    "fault_tolerance.enable": "the weight push knows a single group of ranks",
    "model.converters": "servers are given plain weights and do not round as a converted model "
    "(float8, mx) does, so their logprobs would not be those of the trainer's policy",
}
"""Torchtitan's keys that would be ignored here, or fail later, and why."""


def _check_refused(config: JobConfig) -> None:
    for key, reason in _REFUSED.items():
        value = _get(config, key)
        _require(not value, f"{key} must be left at its default, got {value!r}: {reason}.")


_MINIMA = {
    "grpo.group_size": (1, "a prompt needs a completion"),
    "grpo.prompts_per_step": (1, "a step needs a prompt"),
    "grpo.num_minibatches": (1, "a batch needs an optimizer step"),
    "grpo.num_epochs": (1, "a batch is gone through at least once"),
    "grpo.ptx_coef": (0, "a negative weight would unlearn the mix-in"),
    "grpo.ptx_per_step": (1, "leave grpo.ptx_path out to mix nothing in"),
    "grpo.kl_coef": (0, "a negative penalty would reward drifting away"),
    "grpo.entropy_coef": (0, "a negative bonus would reward collapse"),
    "grpo.advantage_length_power": (0, "0 is off"),
    "grpo.reward_positive_scale": (0, "a negative factor would turn rewards around"),
    "grpo.reward_negative_scale": (0, "a negative factor would turn rewards around"),
    "grpo.overlong_buffer": (0, "0 is off"),
    "grpo.overlong_penalty": (0, "a negative penalty would reward length"),
    "grpo.aggregation_length": (0, "0 is rollout.max_new_tokens"),
    "grpo.importance_floor": (0, "0 is none"),
    "grpo.logprob_chunk_tokens": (1, "a chunk needs a token"),
    "grpo.hf_export_interval": (0, "0 exports at the end only"),
    "rollout.max_head_offpolicyness": (0, "0 is synchronous training"),
    "rollout.max_new_tokens": (1, "a completion needs a token"),
    "prompts.max_prompt_tokens": (0, "0 is what rollout.max_new_tokens leaves"),
    "inference.max_model_len": (0, "0 is training.seq_len"),
    "rollout.max_consecutive_failures": (1, "some failure must be the last"),
    "reward.num_workers": (1, "somebody must score"),
    "reward.max_consecutive_failures": (1, "some failure must be the last"),
    "inference.num_servers": (1, "somebody must generate"),
    "inference.max_restarts": (0, "0 is never"),
    "weight_sync.num_slots": (2, "one is being sent, one is being filled"),
    "weight_sync.bucket_bytes": (1, "a bucket needs room"),
    "weight_sync.max_versions": (0, "0 is as many as the servers ask for"),
    "weight_sync.attest_every": (0, "0 compares the server's version alone"),
    "weight_sync.attest_tolerance": (0, "0 is what the wire dtype allows"),
    "evaluation.num_prompts": (0, "0 evaluates all rows"),
    "evaluation.interval": (0, "0 evaluates before and after the run only"),
    "observe.samples_per_step": (0, "0 writes none"),
    "training.steps": (1, "a run needs a step"),
    "training.local_batch_size": (1, "a microbatch needs a row"),
}
_POSITIVE = (
    "grpo.clip_high",
    "grpo.importance_cap",
    "grpo.advantage_eps",
    "grpo.stop_timeout_seconds",
    "rollout.temperature",
    "rollout.request_timeout_seconds",
    "rollout.batch_timeout_seconds",
    "inference.startup_timeout_seconds",
    "inference.control_timeout_seconds",
    "inference.restart_seconds",
    "weight_sync.timeout_seconds",
    "weight_sync.push_timeout_seconds",
    "weight_sync.retry_seconds",
    "weight_sync.max_retry_seconds",
    "reward.timeout_seconds",
)


def _check_ranges(config: JobConfig) -> None:
    for key, (minimum, reason) in _MINIMA.items():
        value = _get(config, key)
        _require(value >= minimum, f"{key} must be at least {minimum} ({reason}), got {value}.")
    for key in _POSITIVE:
        value = _get(config, key)
        _require(value > 0, f"{key} must be above 0, got {value}.")
    clip_low, top_p = config.grpo.clip_low, config.rollout.top_p
    _require(0 <= clip_low < 1, f"grpo.clip_low must be in [0, 1), got {clip_low}.")
    for key in ("grpo.mismatch_veto", "grpo.ref_model_ema"):
        value = _get(config, key)
        _require(0 <= value < 1, f"{key} must be in [0, 1), 0 for off, got {value}.")
    dual_clip = config.grpo.dual_clip
    _require(
        dual_clip == 0 or dual_clip > 1,
        f"grpo.dual_clip must be 0 (off) or above 1, got {dual_clip}.",
    )
    _require(0 < top_p <= 1, f"rollout.top_p must be in (0, 1], got {top_p}.")
    top_k = config.rollout.top_k
    _require(
        top_k == -1 or top_k >= 1, f"rollout.top_k must be -1 (off) or at least 1, got {top_k}."
    )
    concurrent = config.rollout.max_concurrent_rollouts
    _require(
        concurrent >= config.grpo.group_size,
        f"rollout.max_concurrent_rollouts must be at least grpo.group_size "
        f"({config.grpo.group_size}), or no group could ever start, got {concurrent}.",
    )


def _check_losses(config: JobConfig) -> None:
    """Settings of the loss that contradict each other, or that nothing would read."""
    _check_comparisons(config)
    _check_policy_loss(config.grpo)
    _check_mismatch(config.grpo)
    _check_read("grpo", config.grpo, _READ_WITH)


def _check_comparisons(config: JobConfig) -> None:
    """Rewards, advantages and aggregation."""
    grpo, longest = config.grpo, config.rollout.max_new_tokens
    _require(
        grpo.group_size > 1 or grpo.advantage == "batch_norm",
        "grpo.group_size must be at least 2 for advantages relative to the group, got 1. Raise "
        f"it, or set grpo.advantage = 'batch_norm' (now {grpo.advantage!r}).",
    )
    _require(
        grpo.group_size > 1 or not grpo.filter_zero_advantage,
        "grpo.filter_zero_advantage leaves out every group of one sample: raise grpo.group_size "
        "(now 1) or set grpo.filter_zero_advantage = false.",
    )
    _require(
        not (grpo.filter_zero_advantage and grpo.kl_coef > 0 and grpo.kl_in == "reward"),
        "grpo.filter_zero_advantage cannot be used with grpo.kl_coef above 0 "
        f"({grpo.kl_coef}) and grpo.kl_in = 'reward': groups are left out before the penalty is "
        "known, which would tell their samples apart. Set grpo.kl_in = 'loss', or "
        "grpo.filter_zero_advantage = false.",
    )
    _require(
        grpo.overlong_buffer <= longest,
        f"grpo.overlong_buffer must be at most rollout.max_new_tokens ({longest}), got "
        f"{grpo.overlong_buffer}.",
    )
    _require(
        grpo.aggregation_length == 0 or grpo.aggregation == "constant_length",
        f"grpo.aggregation_length ({grpo.aggregation_length}) is the divisor of grpo.aggregation "
        f"= 'constant_length' alone, got {grpo.aggregation!r}: change the one or leave the other "
        "at 0.",
    )


def _check_policy_loss(grpo: grpo_config.GRPO) -> None:
    loss = grpo.policy_loss
    _require(
        grpo.dual_clip == 0 or loss in ("clip", "gspo"),
        f"grpo.dual_clip bounds grpo.policy_loss = 'clip' and 'gspo' alone, got {loss!r} with "
        f"grpo.dual_clip = {grpo.dual_clip}.",
    )
    _require(
        not grpo.cispo_two_sided or loss == "cispo",
        f"grpo.cispo_two_sided is of grpo.policy_loss = 'cispo' alone, got {loss!r}.",
    )
    if loss in ("clip", "gspo", "cispo", "reinforce"):
        return
    from torchtitan.grpo.losses.policy_function import check_policy_function

    try:
        check_policy_function(grpo)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_mismatch(grpo: grpo_config.GRPO) -> None:
    _require(
        grpo.importance_floor < grpo.importance_cap,
        f"grpo.importance_floor must be below grpo.importance_cap ({grpo.importance_cap}), got "
        f"{grpo.importance_floor}.",
    )
    _require(
        grpo.old_policy == "step_start" or grpo.mismatch_correction != "mask",
        "grpo.mismatch_correction = 'mask' needs grpo.old_policy = 'step_start': with 'sampling' "
        "the ratio itself is against the sampling-time policy, and nothing is corrected.",
    )


_Table = TypeVar("_Table", grpo_config.GRPO, grpo_config.WeightSync)
_Holds = Callable[[grpo_config.GRPO], bool]

_READ_WITH: tuple[tuple[_Holds, str, tuple[str, ...]], ...] = (
    (
        lambda grpo: grpo.kl_coef > 0,
        "grpo.kl_coef above 0",
        ("ref_model_path", "ref_model_ema", "ref_model_offload", "kl_in", "kl_estimator"),
    ),
    (
        lambda grpo: grpo.advantage in ("group_norm", "batch_norm"),
        "grpo.advantage = 'group_norm' or 'batch_norm', which divide by a deviation",
        ("advantage_std", "advantage_eps"),
    ),
    (lambda grpo: grpo.overlong_buffer > 0, "grpo.overlong_buffer above 0", ("overlong_penalty",)),
    (
        lambda grpo: grpo.old_policy == "step_start",
        "grpo.old_policy = 'step_start'",
        ("mismatch_level", "importance_cap", "importance_floor", "mismatch_veto"),
    ),
    (
        lambda grpo: grpo.mismatch_correction != "none",
        "grpo.mismatch_correction = 'truncate' or 'mask'",
        ("importance_cap", "importance_floor"),
    ),
    (lambda grpo: grpo.ptx_path is not None, "grpo.ptx_path", ("ptx_coef", "ptx_per_step")),
)
"""Keys of ``[grpo]`` that something reads only where another setting holds."""


def _check_read(
    name: str, table: _Table, read_with: tuple[tuple[Callable[[_Table], bool], str, tuple], ...]
) -> None:
    """Refuses settings that would be ignored; one that is left at its default is no setting."""
    defaults = type(table)()
    for holds, needed, keys in read_with:
        if holds(table):
            continue
        for key in keys:
            value, default = getattr(table, key), getattr(defaults, key)
            _require(
                value == default,
                f"{name}.{key} needs {needed}, got {value!r}: nothing would read it. Set what it "
                f"needs, or leave {name}.{key} at its default, {default!r}.",
            )


def _check_lengths(config: JobConfig) -> None:
    _require(
        config.rollout.max_new_tokens < config.training.seq_len,
        f"rollout.max_new_tokens ({config.rollout.max_new_tokens}) must leave room for a prompt "
        f"in training.seq_len ({config.training.seq_len}). Raise the one or lower the other.",
    )
    served, longest = config.inference.max_model_len, longest_sequence(config)
    _require(
        served == 0 or served >= longest,
        f"inference.max_model_len must be 0 (training.seq_len) or at least {longest}, the longest "
        "prompt (prompts.max_prompt_tokens, or what training.seq_len leaves) with "
        f"rollout.max_new_tokens, got {served}.",
    )


def _check_data(config: JobConfig) -> None:
    """Minibatches, the supervised mix-in, and recorded rollouts."""
    grpo, rollout = config.grpo, config.rollout
    _require(
        rollout.record is None or rollout.replay is None,
        "Set rollout.record or rollout.replay, not both: what is replayed is recorded already, "
        f"got {rollout.record!r} and {rollout.replay!r}.",
    )
    _check_file("rollout.replay", rollout.replay)
    _require(
        grpo.num_minibatches <= grpo.prompts_per_step or rollout.replay is not None,
        "grpo.num_minibatches must be at most grpo.prompts_per_step "
        f"({grpo.prompts_per_step}), since prompt groups stay whole, got {grpo.num_minibatches}.",
    )
    _check_file("grpo.ptx_path", grpo.ptx_path)
    _require(
        grpo.ptx_path is None or grpo.ptx_per_step >= grpo.num_minibatches,
        f"grpo.ptx_per_step must be at least grpo.num_minibatches ({grpo.num_minibatches}), a "
        f"supervised row for each, got {grpo.ptx_per_step}.",
    )
    _require(
        grpo.ptx_path is None or rollout.temperature == 1,
        f"grpo.ptx_path needs rollout.temperature = 1, got {rollout.temperature}: the trainer "
        "scores every token at that temperature, and supervised ones would be fitted to the "
        "tempered distribution, not to the model's own.",
    )


def _check_file(key: str, path: str | None) -> None:
    """Where rank 0 runs, which alone reads it: other machines need not have it."""
    _require(
        path is None or not _is_rank_zero_here() or Path(path).is_file(),
        f"{key} must be a file, got {path}.",
    )


def _is_rank_zero_here() -> bool:
    return os.environ.get("GROUP_RANK", "0") == "0"


def longest_sequence(config: JobConfig) -> int:
    """Tokens of the longest prompt with the longest completion."""
    seq_len, longest_prompt = config.training.seq_len, config.prompts.max_prompt_tokens
    if longest_prompt == 0:
        return seq_len
    return min(seq_len, longest_prompt + config.rollout.max_new_tokens)


def check_model(config: JobConfig, model: "HFModel") -> None:
    """Refuses what this model cannot do: sequences longer than it was made for, which
    servers refuse, too, and layouts that it cannot be cut into.

    Raises:
        ConfigError: With the keys to change.
    """
    needed = longest_sequence(config)
    if config.inference.launch and config.rollout.replay is None:
        needed = config.inference.max_model_len or config.training.seq_len
    limit = model.max_position_embeddings
    _require(
        limit == 0 or needed <= limit,
        f"Sequences must be at most {limit} tokens long (max_position_embeddings of "
        f"{model.path}), got {needed}. Lower training.seq_len; or, to pack short sequences into "
        "longer rows, set prompts.max_prompt_tokens and inference.max_model_len.",
    )
    for problem in model_layout_problems(config, model):
        raise ConfigError(problem)


def _check_machine(config: JobConfig) -> None:
    """What must be there where the trainer runs."""
    grpo = config.grpo
    for is_needed, setting, instead in (
        (grpo.packed_attention == "flex", "grpo.packed_attention = 'flex'", "'auto' or 'sdpa'"),
        (
            config.weight_sync.staging == "host",
            "weight_sync.staging = 'host'",
            "'auto', since all memory is the host's",
        ),
    ):
        if is_needed:
            import torch

            _require(
                torch.cuda.is_available(),
                f"{setting} needs a CUDA GPU, and none is visible: use {instead}.",
            )
    _require(
        grpo.kl_coef <= 0 or grpo.ref_model_path is None or Path(grpo.ref_model_path).is_dir(),
        "grpo.ref_model_path must be a Hugging Face model directory (grpo.kl_coef is above 0), "
        f"got {grpo.ref_model_path}.",
    )


def _check_inference(config: JobConfig) -> None:
    if config.rollout.replay is not None:
        return  # there is no server
    inference = config.inference
    sources = {
        "inference.launch = true": inference.launch,
        "inference.urls": bool(inference.urls),
        "inference.urls_file": inference.urls_file is not None,
    }
    given = [name for name, is_given in sources.items() if is_given]
    _require(
        len(given) == 1,
        "Set either inference.launch = true or inference.urls or inference.urls_file, got "
        + (f"both {' and '.join(given)}." if given else "none of them."),
    )
    _check_file("inference.urls_file", inference.urls_file)
    try:
        if inference.urls:
            checked_urls(inference.urls, "inference.urls")
        named_urls(inference)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    needs_python = inference.launch and inference.kind != "embedded"
    _require(
        not needs_python or inference.python is not None,
        f"inference.launch with inference.kind = {inference.kind!r} needs inference.python, the "
        f"interpreter of its environment: run `bash scripts/install_{inference.kind}.sh` and set "
        f"inference.python = '.venv-{inference.kind}/bin/python'.",
    )
    python = inference.python
    _require(
        python is None or os.access(python, os.X_OK),
        f"inference.python must be an executable file, got {python}.",
    )


_SyncHolds = Callable[[grpo_config.WeightSync], bool]

_SYNC_READ_WITH: tuple[tuple[_SyncHolds, str, tuple[str, ...]], ...] = (
    (
        lambda sync: sync.transport == "group",
        "weight_sync.transport = 'group'",
        ("backend", "master_address", "delta"),
    ),
    (
        lambda sync: sync.transport == "disk",
        "weight_sync.transport = 'disk'",
        ("disk_path",),
    ),
    (
        lambda sync: sync.attest_every > 0,
        "weight_sync.attest_every above 0",
        ("attest_tolerance",),
    ),
)
"""Keys of ``[weight_sync]`` that something reads only where another setting holds."""


def _check_weight_sync(config: JobConfig) -> None:
    sync = config.weight_sync
    _check_read("weight_sync", sync, _SYNC_READ_WITH)
    _require(
        sync.max_versions == 0 or sync.max_versions >= 2,
        "weight_sync.max_versions must be 0 (as many as the servers ask for) or at least 2: one "
        f"is being gathered while another is sent. Got {sync.max_versions}.",
    )
    _require(
        sync.max_retry_seconds >= sync.retry_seconds,
        f"weight_sync.max_retry_seconds must be at least weight_sync.retry_seconds "
        f"({sync.retry_seconds:g}), from which the pause grows, got {sync.max_retry_seconds:g}.",
    )
    _require(
        sync.transport != "disk" or sync.disk_path is not None,
        "weight_sync.transport = 'disk' needs weight_sync.disk_path, a directory that trainer and "
        "servers share, got none.",
    )
    path = sync.disk_path
    _require(
        path is None or Path(path).is_dir() or not Path(path).exists(),
        f"weight_sync.disk_path must be a directory, got the file {path}.",
    )
    for key in ("delta", "checksum"):
        _require(
            config.inference.kind != "sglang" or not getattr(sync, key),
            f"weight_sync.{key} needs inference.kind = 'embedded' or 'vllm': SGLang cannot do it, "
            f"and it would be ignored. Leave weight_sync.{key} at false.",
        )


def _check_layout(config: JobConfig) -> None:
    for problem in layout_problems(config):
        raise ConfigError(problem)


def _get(config: JobConfig, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(config, table), name)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def is_dry_run(args: list[str]) -> bool:
    """Takes ``--dry-run`` out of the arguments; True where it was there."""
    if "--dry-run" not in args:
        return False
    args.remove("--dry-run")
    return True


def describe(config: JobConfig) -> str:
    """The resolved configuration as TOML-like lines, and the planned layout."""
    lines = []
    for table, values in config.to_dict().items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {value!r}" for key, value in values.items()]
        lines.append("")
    rollouts = config.grpo.prompts_per_step * config.grpo.group_size
    lines += [
        "Layout",
        f"  ranks: {describe_layout(config)}",
        f"  global batch: {config.grpo.prompts_per_step} prompts x {config.grpo.group_size} "
        f"rollouts = {rollouts}, packed into rows of {config.training.seq_len} tokens",
        f"  staleness: at most {config.rollout.max_head_offpolicyness} steps",
        f"  servers: {_describe_servers(config)}",
    ]
    return "\n".join(lines)


def _describe_servers(config: JobConfig) -> str:
    if config.rollout.replay is not None:
        return f"none, rollouts are those of {config.rollout.replay}"
    inference = config.inference
    if inference.launch:
        return f"{inference.num_servers} x {inference.kind}, launched on this machine"
    source = f" ({inference.urls_file})" if inference.urls_file else ""
    return f"{inference.kind} at {', '.join(named_urls(inference))}{source}"
