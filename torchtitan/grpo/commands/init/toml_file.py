# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The text of the TOML file, in which every line has its reason."""

import re
from collections.abc import Mapping
from typing import Any

from torchtitan.grpo.run_folder.start_record import toml_value

_WIDTH = 100
# A value in braces is that of another name.
_SETTING = re.compile(r"(\w+)(?: = (?:\{(\w+)\}|(\S+)))?  # (.+)")
_TABLES = """\
[job]
dump_folder  # metrics, samples and the trained model

[model]
hf_assets_path  # {architecture}, {num_params} parameters

[lora]
rank  # adapters: training all weights does not fit into memory
base_dtype  # the frozen weights take half the memory of float32
target_modules  # experts cannot have adapters

[training]
steps  # {why_steps}
seq_len  # a prompt and its completion have at most {longest}; rows hold {row_holds}
local_batch_size  # rows: {microbatch:,} tokens in a microbatch
mixed_precision_param  # {why_dtype}

[optimizer]
lr  # {why_lr}

[lr_scheduler]
warmup_steps  # the learning rate rises from 0, then stays

[activation_checkpoint]
mode  # the least recomputation with which a step fits into memory, by the estimate above

[checkpoint]
enable  # a run that was killed goes on from the newest one
interval  # steps between two of them
keep_latest_k  # older ones are removed

[debug]
seed = 0  # the same prompts in the same order in each run

[grpo]
group_size  # completions of each prompt, compared with each other
prompts_per_step  # {batch} completions in a step

[prompts]
path  # {num_rows:,} rows
name  # the data set's configuration
split  # the data set's part to train on
column  # holds the prompt
rename  # the names that prompts and built-in rewards have
template  # {why_template}
chat_template_kwargs  # answers without thinking are short; true needs more tokens
max_prompt_tokens  # measured {typical} tokens at the 99th percentile; {dropped} of {measured:,} are longer

[rollout]
max_new_tokens  # {why_new}; raise it if rollout/length_fraction is above 0.1
max_concurrent_rollouts  # of the {batch} of a step
temperature = 1.0  # completions of a group must differ
max_head_offpolicyness = 1  # generation runs at most one step ahead of training

[inference]
kind  # the servers that generate
launch = true  # the run starts and stops them
lend  # on the only GPU, they generate while training waits, and sleep while it trains
python  # the servers' environment, which was found
num_servers  # half of the GPUs generate
max_model_len  # the longest prompt with its completion

[reward]
functions  # {why_reward}

[evaluation]
path = {held_path}  # {why_held}
name = {held_name}  # the data set's configuration
split = {held_split}  # the part of it
num_prompts  # of them; each is completed once, greedily
function  # scores them; the mean is in evaluations.jsonl and the report
interval = {held_interval}  # steps between two evaluations, which run beside training
"""
_HEADING = """\
# Purpose:  GRPO on {path} with {hf_assets_path}.
#           Written by torchtitan-grpo init on {date}; every value may be changed.
# Hardware: {hardware}. Start it in the folder of init:
#               {command}
# Memory:   a training step needs {memory}.
# Expected: the mean reward in the line of each step rises. If it stays at 0 or at its maximum,
#           nothing is learned: read samples.jsonl, and section 5 of docs/how-to/first-model.md.

"""


def settings_text(values: Mapping[str, Any]) -> str:
    """Returns the tables of the file. ``values`` has values of settings and of placeholders in comments.

    Settings whose value is missing or None are left out.
    """
    tables = []
    for table in _TABLES.split("\n\n"):
        header, *lines = table.splitlines()
        settings = [_setting(line, values) for line in lines]
        if any(settings):
            tables.append("\n".join([header, *filter(None, settings)]) + "\n")
    return "\n".join(tables)


def whole_text(settings: str, values: Mapping[str, Any]) -> str:
    """Returns the settings with the comments that stand at the head of the file."""
    return _HEADING.format_map(values) + settings


def _setting(line: str, values: Mapping[str, Any]) -> str:
    matched = _SETTING.fullmatch(line)
    assert matched is not None, line
    key, other, fixed, why = matched.groups()
    if not fixed and values.get(other or key) is None:
        return ""
    line, why = f"{key} = {fixed or text_value(values[other or key])}", why.format_map(values)
    if "\n" in line or len(line) + len(why) > _WIDTH:
        return f"# {why}\n{line}"
    return f"{line:<26}  # {why}"


def text_value(value: Any) -> str:
    """Writes a value; a text with line breaks takes several lines."""
    if not isinstance(value, str) or "\n" not in value:
        return toml_value(value)
    lines = [toml_value(line)[1:-1] for line in value.split("\n")]
    return "\n".join(['"""', *lines]) + '"""'
