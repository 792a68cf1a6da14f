# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks which sets of prompts there are, and how often each is drawn from."""

import math
import string
from pathlib import Path

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.config_checks.rules import check_file, require
from torchtitan.grpo.job_config import JobConfig

_FILE_ENDINGS = (".jsonl", ".json", ".parquet")


def check_prompts(config: JobConfig) -> None:
    """Refuses prompt sets that are missing or named twice, and weights that do not fit them."""
    prompts = config.prompts
    _check_template(prompts.template)
    if not config.has_servers:
        return  # recorded rollouts and supervised examples have their prompts
    require(
        not (prompts.path and prompts.paths),
        f"Set prompts.path or prompts.paths, not both, got {prompts.path!r} and {prompts.paths}.",
    )
    require(
        bool(prompts.path or prompts.paths),
        "prompts.path must name the prompts, or prompts.paths several sets of them, got nothing.",
    )
    _check_paths(prompts.paths)
    _check_weights(prompts)
    _check_chat(prompts)


def _check_paths(paths: list[str]) -> None:
    require(all(paths), f"prompts.paths must name a set in each entry, got {paths}.")
    require(
        len(set(paths)) == len(paths),
        f"prompts.paths must name each set once, got {paths}. Raise an entry of prompts.weights to "
        "draw from a set more often.",
    )
    for path in paths:
        # Any other path may be the name of a data set, which is looked up when it is opened.
        if path.endswith(_FILE_ENDINGS) and not Path(path).is_dir():
            check_file(f"Each of prompts.paths that ends in one of {_FILE_ENDINGS}", path)


def _check_weights(prompts: Prompts) -> None:
    weights, paths = prompts.weights, prompts.paths
    require(
        not weights or bool(paths),
        f"prompts.weights needs prompts.paths, got {weights} and a single set. Set prompts.paths, or "
        "remove prompts.weights.",
    )
    require(
        len(weights) in (0, len(paths)),
        f"prompts.weights must have one entry for each of the {len(paths)} prompts.paths, or be "
        f"empty to weight sets by their sizes, got {len(weights)} entries.",
    )
    require(
        all(weight > 0 and math.isfinite(weight) for weight in weights),
        f"prompts.weights must be finite and above 0, got {weights}. Remove a set that should not be "
        "used from prompts.paths.",
    )


def _check_template(template: str | None) -> None:
    """Refuses a template that gives all prompts the same text."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template or "")]
    except ValueError:  # the first prompt tells what is wrong
        return
    require(
        template is None or any(fields),
        f"prompts.template must contain {{prompt}} or another column in braces, got {template!r}, with "
        "which all prompts would be the same. Insert {prompt}, or remove prompts.template.",
    )


_RENDERING = ("add_generation_prompt", "continue_final_message", "messages", "tokenize")


def _check_chat(prompts: Prompts) -> None:
    """Refuses settings of chat prompts beside those of string prompts, and reserved variables."""
    for key, value in prompts.chat_settings().items():
        require(
            prompts.template is None or not value,
            f"prompts.template applies to string prompts and prompts.{key} to chat messages, got both. "
            "Remove one of them.",
        )
    for name in prompts.chat_template_kwargs:
        require(
            name not in _RENDERING,
            f"prompts.chat_template_kwargs must hold variables of the template, got {name!r}, which "
            "the run sets itself. Remove it.",
        )
