# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Derives the values of the TOML file from lengths, reward, model and machine."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.grpo.commands.init.columns import Source
from torchtitan.grpo.commands.init.machine import Machine
from torchtitan.grpo.commands.init.prompt_form import PromptForm
from torchtitan.grpo.commands.init.reward_choice import RewardChoice
from torchtitan.grpo.commands.init.toml_file import settings_text
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.system.cpu_speed import FAST

_GROUP_SIZE = 8
_THINKING_TIMES = 4
# By numbers of parameters. At 135 M, arithmetic is learned well with 2e-5; with 2e-6, twenty steps change
# nothing that can be seen. Models of half a billion and more are usually trained with 2e-6 and less.
_LEARNING_RATES = ((10**7, 5e-4), (4 * 10**8, 2e-5), (10**9, 2e-6))
_LORA_RANK, _LORA_TIMES = 16, 10
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_EMBEDDED_CONCURRENT = 32
# By whether a GPU trains. Tokens of a row, of a microbatch, and of a completion that reasons.
_ROW = {True: 2048, False: 256}
_MICROBATCH = {True: 8192, False: 2048}
_NEW, _MOST_NEW = {True: 1024, False: 256}, {True: 4096, False: 512}
_HELD_OUT = {True: (256, 20), False: (64, 10)}  # prompts, and steps between two evaluations
_OF_CALCULATION = 4  # a calculation in one line gets this part of _NEW
_ON_GPU = {
    "steps": 200,
    "why_steps": "a first run; raise it while the reward rises",
    "warmup_steps": 20,
    "mixed_precision_param": "bfloat16",
    "why_dtype": "as the servers compute",
    "enable": True,
    "interval": 50,
    "keep_latest_k": 2,
}
_ON_CPU = {
    "steps": 20,
    "why_steps": "shows that it runs; to learn, more",
    "warmup_steps": 2,
    "mixed_precision_param": "float32",
    "why_dtype": "this CPU multiplies bfloat16 hardly faster",
}


@dataclass(frozen=True)
class Findings:
    """What was found about model, data and machine.

    ``lengths`` are prompt lengths in tokens, capped at one above the model's longest sequence.
    ``answer_tokens`` is the length of a long right answer, or 0 if that says nothing about
    completions. ``function`` is the value of ``reward.functions``.
    """

    model_name: str
    model: HFModel
    num_params: int
    num_rows: int
    form: PromptForm
    lengths: np.ndarray
    reward: RewardChoice
    function: str
    answer_tokens: int
    machine: Machine
    dump_folder: str = "outputs"
    held_out: Source | None = None

    def length(self, percent: float) -> int:
        return int(np.percentile(self.lengths, percent, method="higher"))


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens; ``row`` is ``training.seq_len``."""

    prompt: int
    new: int
    row: int
    num_dropped: int

    @property
    def group(self) -> int:
        """The most tokens that a group can have, with the prompt counted once."""
        return self.prompt + _GROUP_SIZE * self.new


def longest_sequence(model: HFModel) -> int:
    return min(n for n in (model.max_position_embeddings, model.window) if n)


def choose_sizes(found: Findings) -> Sizes:
    """Chooses lengths; ConfigError if prompts and answers do not fit into the model's longest sequence."""
    limit = longest_sequence(found.model)
    typical, longest = found.length(99), found.length(100)
    prompt = _up(longest if longest <= 2 * typical else typical, 16)
    new = _new_tokens(found)
    if prompt + new > limit:
        new = min(new, max(limit // 2, limit - prompt))
        prompt = limit - new
    dropped = int((found.lengths > prompt).sum())
    if dropped == len(found.lengths):
        raise ConfigError(
            f"MODEL must have room for a prompt and an answer of {new} tokens, but its longest sequence has "
            f"{limit} tokens, and none of the {dropped} prompts that were read has at most {prompt}. Name "
            "another model or column."
        )
    # A group shares its prompt in one row only, and what a group leaves of a row may be padding.
    group, on_gpu = Sizes(prompt, new, 0, dropped).group, found.machine.on_gpu
    longest = group if _up(group, 128) <= _MICROBATCH[on_gpu] else prompt + new
    return Sizes(prompt, new, max(_up(longest, 128), _ROW[on_gpu]), dropped)


def _new_tokens(found: Findings) -> int:
    wanted, on_gpu = _up(2 * found.answer_tokens, 16), found.machine.on_gpu
    if found.reward.form == "alone":
        return max(16, wanted)
    budget = _NEW[on_gpu] * (_THINKING_TIMES if found.form.thinks else 1)
    if _in_one_line(found):
        budget //= _OF_CALCULATION
    return max(budget, min(wanted, _MOST_NEW[on_gpu]))


def _in_one_line(found: Findings) -> bool:
    return found.reward.form == "calculation" and not found.form.thinks


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def choose_settings(found: Findings, sizes: Sizes) -> tuple[str, dict[str, Any], bool]:
    """Returns settings as TOML text and by name, for the first way to train that fits into memory.

    The third value is whether any way fits. If none does, the settings are for the way that needs least.
    """
    machine, fits = found.machine, False
    values = _values(found, sizes)
    most = max(1, _MICROBATCH[machine.on_gpu] // sizes.row)
    ways = ((most, "none"), (most, "selective"), (most, "full"), (1, "full"))
    text = ""
    for is_lora, (rows, mode) in [(is_lora, way) for is_lora in (False, True) for way in ways]:
        values |= {"local_batch_size": rows, "mode": mode, "microbatch": rows * sizes.row}
        values |= _learning_rate(found, is_lora)
        text = settings_text(values)
        needed, available = machine.step_memory(tomllib.loads(text), found.model)
        values["memory"] = f"{needed / 2**30:.2f} of {available / 2**30:.1f} GiB, by estimate"
        fits = needed <= available
        if fits:
            break
    return text, values, fits


def _values(found: Findings, sizes: Sizes) -> dict[str, Any]:
    machine, reward, prompts = found.machine, found.reward, found.form.settings
    by_device, speedup = _ON_GPU if machine.on_gpu else _ON_CPU, machine.bfloat16_speedup
    if not machine.on_gpu and speedup >= FAST:
        why = f"this CPU multiplies bfloat16 {speedup:.1f} times as fast as float32; the servers follow"
        by_device = by_device | {"mixed_precision_param": "bfloat16", "why_dtype": why}
    per_step = min(128, max(32, 16 * machine.num_ranks)) if machine.on_gpu else 4
    batch = _GROUP_SIZE * min(per_step, found.num_rows)
    why_reward = "to be written: no built-in reward fits"
    if reward.is_builtin:
        why_reward = f"gives 1.0 to {reward.hits} of {reward.num_rows} right answers of the data"
    room = "room for a line; " if _in_one_line(found) else "room to reason; "
    if reward.form == "alone":
        room = ""
    return {
        **by_device,
        **{key: value or None for key, value in vars(prompts).items()},
        "split": _split(prompts.path, prompts.split),
        **_held_out(found),
        "num_rows": found.num_rows,
        "why_template": found.form.why_template,
        "max_prompt_tokens": sizes.prompt,
        "typical": found.length(99),
        "dropped": sizes.num_dropped,
        "measured": len(found.lengths),
        "dump_folder": found.dump_folder,
        "hardware": machine.describe(),
        "hf_assets_path": found.model_name,
        "architecture": found.model.architecture,
        "num_params": count_text(found.num_params),
        "seq_len": sizes.row,
        "longest": sizes.prompt + sizes.new,
        "row_holds": "a whole group" if sizes.group <= sizes.row else "several",
        "group_size": _GROUP_SIZE,
        "prompts_per_step": batch // _GROUP_SIZE,
        "batch": batch,
        "max_new_tokens": sizes.new,
        "why_new": f"{room}{_answers_text(found)}",
        "max_concurrent_rollouts": min(batch, _EMBEDDED_CONCURRENT)
        if machine.kind == "embedded"
        else batch,
        "kind": machine.kind,
        "lend": machine.num_gpus == 1 or None,
        "python": machine.python,
        "num_servers": machine.num_servers if machine.num_servers > 1 else None,
        "max_model_len": sizes.prompt + sizes.new,
        "functions": [found.function],
        "why_reward": why_reward,
    }


def _held_out(found: Findings) -> dict[str, Any]:
    if (held := found.held_out) is None:
        return {}
    most, interval = _HELD_OUT[found.machine.on_gpu]
    return {
        "held_path": held.path,
        "held_name": held.name,
        "held_split": _split(held.path, held.split),
        "why_held": held.describe(),
        "num_prompts": min(held.num_rows, most),
        "function": found.function,
        "held_interval": interval,
    }


def _split(path: str, split: str) -> str | None:
    """Returns the value to write for ``prompts.split``; None for a file if no rows are selected in brackets."""
    return None if Path(path).is_file() and "[" not in split else split


def _learning_rate(found: Findings, is_lora: bool) -> dict[str, Any]:
    rates = (rate for bound, rate in _LEARNING_RATES if found.num_params < bound)
    rate = next(rates, 1e-6)
    if not is_lora:
        why = f"usual for {count_text(found.num_params)} parameters; small models need more"
        return {"lr": rate, "why_lr": why}
    return {
        "lr": float(f"{rate * _LORA_TIMES:.2g}"),  # not 9.999999999999999e-06
        "why_lr": "ten times that of whole weights, as adapters need",
        "rank": _LORA_RANK,
        "base_dtype": "bfloat16",
        "target_modules": _ATTENTION if found.model.model_args.has_experts else None,
    }


def _answers_text(found: Findings) -> str:
    if not (num_tokens := found.answer_tokens):
        subject = "results alone do not tell" if found.reward.is_builtin else "nothing tells"
        return f"{subject} the length of answers"
    return f"long right answers have {num_tokens} token{'s' if num_tokens > 1 else ''}"


def count_text(number: int) -> str:
    if number >= 10**9:
        return f"{number / 1e9:.2g} B"
    return f"{number / 1e6:.0f} M" if number >= 10**8 else f"{number / 1e6:.2g} M"
