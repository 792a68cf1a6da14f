# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The values of the TOML file, from lengths, reward, model and machine."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.grpo.command_line import ConfigError
from torchtitan.grpo.init_config.machine import Machine, StepMemory
from torchtitan.grpo.init_config.prompt_form import Lengths, PromptForm
from torchtitan.grpo.init_config.reward_choice import RewardChoice
from torchtitan.grpo.init_config.toml_file import Setting
from torchtitan.grpo.models.hf_config import HFModel

GROUP_SIZE = 8
_PERCENTILE = 99
_BUDGET = {True: 1024, False: 256}
_MOST_NEW = {True: 4096, False: 1024}
_THINKING_TIMES = 4
_ROW = {True: 2048, False: 256}
# The most tokens of a microbatch, and those below which a device is not busy.
_MICROBATCH_TOKENS = {True: (16_384, 4096), False: (2048, 512)}
# By whether a GPU trains.
_STEPS = {True: 200, False: 20}
_LARGE_ON_CPU = 10**8
_SLOW_REQUEST_SECONDS = 3600.0
_LEARNING_RATES = ((10**7, 5e-4), (10**8, 2e-5), (10**9, 2e-6))
_LORA_RANK, _LORA_TIMES = 16, 10
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class Findings:
    """What was found; ``answer_tokens`` is the length of a long right answer.

    ``reward_names`` are the values of ``reward.functions``.
    """

    model_name: str
    model: HFModel
    num_params: int
    num_rows: int
    form: PromptForm
    lengths: Lengths
    reward: RewardChoice
    reward_names: tuple[str, ...]
    answer_tokens: int
    machine: Machine

    @property
    def is_slow(self) -> bool:
        """Whether a CPU has to compute a model of more than toy size."""
        return not self.machine.on_gpu and self.num_params >= _LARGE_ON_CPU


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens; ``row`` is ``training.seq_len``."""

    prompt: int
    new: int
    row: int
    num_dropped: int

    @property
    def longest(self) -> int:
        return self.prompt + self.new


@dataclass(frozen=True)
class Fit:
    """How training fits into memory: rows of a microbatch, recomputation, and adapters."""

    rows: int
    checkpointing: str
    lora: bool


def longest_sequence(model: HFModel) -> int:
    limits = [n for n in (model.max_position_embeddings, model.window) if n]
    return min(limits)


def choose_sizes(found: Findings) -> Sizes:
    """Raises ConfigError if the model's longest sequence has no room for prompts and answers."""
    lengths, on_gpu = found.lengths, found.machine.on_gpu
    limit = longest_sequence(found.model)
    typical, longest = lengths.percentile(_PERCENTILE), lengths.percentile(100)
    prompt = _up(longest if longest <= 2 * typical else typical, 16)
    new = _new_tokens(found)
    if prompt + new > limit:
        new = min(new, max(limit // 2, limit - prompt))
        prompt = min(prompt, limit - new)
    dropped = lengths.num_longer(prompt)
    if prompt < 1 or dropped == lengths.num_rows:
        raise ConfigError(
            f"MODEL must have room for a prompt and an answer of {new} tokens, but its longest sequence has "
            f"{limit} tokens, and none of the {lengths.num_rows} prompts that were read has at most "
            f"{prompt}. Name another model or column."
        )
    row = max(_up(prompt + new, 128), _ROW[on_gpu])
    return Sizes(prompt, new, row, dropped)


def _new_tokens(found: Findings) -> int:
    on_gpu = found.machine.on_gpu
    wanted = _up(2 * found.answer_tokens, 16)
    if found.reward.form == "alone":
        return max(16, wanted)
    times = _THINKING_TIMES if found.form.thinks else 1
    budget = _BUDGET[on_gpu] * times
    return budget if found.is_slow else max(budget, min(wanted, _MOST_NEW[on_gpu]))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def choose_tables(
    found: Findings, sizes: Sizes, dump_folder: str
) -> tuple[dict[str, list[Setting]], StepMemory]:
    """Returns the tables of the first way to train that fits into memory, or else of the last."""
    for fit in _ways(found, sizes):
        tables = _tables(found, sizes, fit, dump_folder)
        memory = StepMemory.of(_data(tables), found.model, found.machine, found.num_params)
        if memory.fits:
            return tables, memory
    return tables, memory


def _ways(found: Findings, sizes: Sizes) -> list[Fit]:
    """Ways to train, those that lose the least speed first, and adapters last."""
    most, least = (max(1, n // sizes.row) for n in _MICROBATCH_TOKENS[found.machine.on_gpu])
    numbers = [n for n in (8, 4, 2, 1) if least <= n <= most] or [least]
    modes = ("none", "selective", "full")
    ways = itertools.product((False, True), modes, numbers)
    return [*(Fit(rows, mode, lora) for lora, mode, rows in ways), Fit(1, "full", True)]


def _data(tables: dict[str, list[Setting]]) -> dict[str, dict[str, Any]]:
    return {name: {s.key: s.value for s in settings} for name, settings in tables.items()}


def _tables(found: Findings, sizes: Sizes, fit: Fit, dump_folder: str) -> dict[str, list[Setting]]:
    prompts_per_step = min(found.num_rows, _prompts_per_step(found))
    batch = GROUP_SIZE * prompts_per_step
    parameters = f"{found.model.architecture}, {_count(found.num_params)} parameters"
    warmup, folder = _STEPS[found.machine.on_gpu] // 10, "metrics, samples and the trained model"
    name = f"GRPO, {found.model_name} on {found.form.settings.path}"
    mode, compared = fit.checkpointing, "completions of each prompt, compared with each other"
    tables = {
        "job": [
            Setting("dump_folder", dump_folder, folder),
            Setting("description", name, "a name for trackers"),
        ],
        "model": [Setting("hf_assets_path", found.model_name, parameters)],
        "lora": _lora(found) if fit.lora else [],
        "training": _training(found, sizes, fit),
        "optimizer": [_learning_rate(found.num_params, fit.lora)],
        "lr_scheduler": [
            Setting("warmup_steps", warmup, "the learning rate rises from 0, then stays")
        ],
        "activation_checkpoint": [Setting("mode", mode, _why_checkpointing(mode))],
        "checkpoint": _checkpoint(found.machine),
        "debug": [Setting("seed", 0, "the same prompts in the same order in each run")],
        "grpo": [
            Setting("group_size", GROUP_SIZE, compared),
            Setting("prompts_per_step", prompts_per_step, f"{batch} completions in a step"),
        ],
        "prompts": _prompts(found, sizes),
        "rollout": _rollout(found, sizes, batch),
        "inference": _inference(found, sizes),
        "reward": _reward(found),
    }
    return {table: settings for table, settings in tables.items() if settings}


def _prompts_per_step(found: Findings) -> int:
    if found.machine.on_gpu:
        return min(128, max(32, 16 * found.machine.num_ranks))
    return 2 if found.is_slow else 8


def _lora(found: Findings) -> list[Setting]:
    settings = [
        Setting("rank", _LORA_RANK, "adapters: training all weights does not fit into memory"),
        Setting("base_dtype", "bfloat16", "the frozen weights take half the memory of float32"),
    ]
    if getattr(found.model.model_args, "moe_enabled", False):
        settings.append(Setting("target_modules", _ATTENTION, "experts cannot have adapters"))
    return settings


def _training(found: Findings, sizes: Sizes, fit: Fit) -> list[Setting]:
    on_gpu = found.machine.on_gpu
    steps, dtype = "shows that it runs; to learn, more", "float32"
    why_dtype = "bfloat16 is slow on a CPU"
    if on_gpu:
        steps, dtype = "a first run; raise it while the reward rises", "bfloat16"
        why_dtype = "as the servers compute"
    row = f"a prompt and its completion have at most {sizes.longest}; rows hold several"
    return [
        Setting("steps", _STEPS[on_gpu], steps),
        Setting("seq_len", sizes.row, row),
        Setting(
            "local_batch_size", fit.rows, f"rows: {fit.rows * sizes.row:,} tokens in a microbatch"
        ),
        Setting("mixed_precision_param", dtype, why_dtype),
    ]


def _learning_rate(num_params: int, lora: bool) -> Setting:
    rate = next((rate for bound, rate in _LEARNING_RATES if num_params < bound), 1e-6)
    if lora:
        rate = float(f"{rate * _LORA_TIMES:.2g}")  # not 9.999999999999999e-06
        return Setting("lr", rate, "ten times that of whole weights, as adapters need")
    return Setting("lr", rate, f"usual for {_count(num_params)} parameters; small models need more")


def _count(number: int) -> str:
    if number >= 10**9:
        return f"{number / 1e9:.2g} B"
    return f"{number / 1e6:.0f} M" if number >= 10**8 else f"{number / 1e6:.2g} M"


def _why_checkpointing(mode: str) -> str:
    if mode == "none":
        return "nothing is recomputed, since activations fit into memory"
    what = "some" if mode == "selective" else "most"
    return f"{what} activations are recomputed, since not all fit into memory"


def _checkpoint(machine: Machine) -> list[Setting]:
    if not machine.on_gpu:
        return [Setting("enable", False, "a short run; its model is exported in any case")]
    return [
        Setting("enable", True, "a run that was killed goes on from the newest one"),
        Setting("interval", 50, "steps between two of them"),
        Setting("keep_latest_k", 2, "older ones are removed"),
    ]


def _prompts(found: Findings, sizes: Sizes) -> list[Setting]:
    form, lengths = found.form, found.lengths
    settings = form.settings
    is_file = Path(settings.path).is_file()
    dropped = "none is longer"
    if sizes.num_dropped:
        dropped = f"{sizes.num_dropped} of {lengths.num_rows:,} read are longer and left out"
    typical = lengths.percentile(_PERCENTILE)
    length = f"measured {typical} tokens at the {_PERCENTILE}th percentile; {dropped}"
    values = [
        Setting("path", settings.path, f"{found.num_rows:,} rows"),
        Setting("name", settings.name, "the data set's configuration"),
        Setting("split", None if is_file else settings.split, "the data set's part to train on"),
        Setting("column", settings.column, "holds the prompt"),
        Setting("rename", settings.rename or None, _why_rename(settings.rename)),
        *(Setting(key, getattr(settings, key), why) for key, why in form.why.items()),
        Setting("max_prompt_tokens", sizes.prompt, length),
    ]
    return [setting for setting in values if setting.value is not None]


def _why_rename(rename: dict[str, str]) -> str:
    is_path = any("." in old for old in rename)
    paths = ", which are within columns" if is_path else ""
    return f"the names that prompts and built-in rewards have{paths}"


def _rollout(found: Findings, sizes: Sizes, batch: int) -> list[Setting]:
    answers = "right answers have an unknown length"
    if found.answer_tokens:
        tokens = "1 token" if found.answer_tokens == 1 else f"{found.answer_tokens} tokens"
        answers = f"right answers have up to {tokens}"
    concurrent, why = batch, "one batch at a time in flight"
    if found.machine.kind == "embedded":
        room = found.machine.num_concurrent(found.model, found.num_params, sizes.longest)
        if room < batch:
            concurrent = max(GROUP_SIZE, room)
            why = "as many as the memory of the servers' caches holds"
    if found.reward.form != "alone":
        answers = f"room to reason; {answers}"
    length = f"{answers}; raise it if rollout/length_fraction is above 0.1"
    settings = [
        Setting("max_new_tokens", sizes.new, length),
        Setting("max_concurrent_rollouts", concurrent, why),
        Setting("temperature", 1.0, "completions of a group must differ"),
        Setting("max_head_offpolicyness", 1, "generation runs at most one step ahead of training"),
    ]
    if found.is_slow:
        slow = "a CPU may need many minutes for a completion of a model of this size"
        settings.append(Setting("request_timeout_seconds", _SLOW_REQUEST_SECONDS, slow))
    return settings


def _inference(found: Findings, sizes: Sizes) -> list[Setting]:
    machine = found.machine
    installed = "its environment was found" if machine.python else "needs no further installation"
    values = [
        Setting("kind", machine.kind, f"the servers that generate; {installed}"),
        Setting("launch", True, "the run starts and stops them"),
    ]
    if machine.python:
        values.append(Setting("python", machine.python, "the servers' environment"))
    if machine.num_servers > 1:
        values.append(Setting("num_servers", machine.num_servers, "half of the GPUs generate"))
    values.append(Setting("max_model_len", sizes.longest, "the longest prompt with its completion"))
    return values


def _reward(found: Findings) -> list[Setting]:
    reward = found.reward
    functions = list(found.reward_names)
    if not reward.is_builtin:
        return [Setting("functions", functions, "to be written: no built-in reward fits")]
    why = f"gives 1.0 to {reward.hits} of {reward.num_rows} right answers of the data"
    if len(functions) == 1:
        return [Setting("functions", functions, why)]
    return [
        Setting("functions", functions, f"the first {why}"),
        Setting("weights", list(reward.weights), "the form alone is worth little"),
    ]
