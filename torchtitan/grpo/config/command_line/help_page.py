# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The page of ``--help``: this project's settings by topic, then torchtitan's."""

import itertools
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from torchtitan.grpo.config.bounds import bounds_of
from torchtitan.grpo.config.command_line.arguments import is_flag, metavar
from torchtitan.grpo.config.field_docs import field_docs, first_sentence

HEADINGS = {
    "model.hf_assets_path": "The model",
    "prompts.path": "Prompts",
    "prompts.single_rank_load": "How a batch is spread over ranks",
    "reward.functions": "Rewards",
    "reward.judge.kind": "A judge or a reward model on a server",
    "evaluation.path": "Evaluation on held-out prompts",
    "grpo.group_size": "The batch",
    "grpo.advantage": "Advantages and shaped rewards",
    "grpo.policy_loss": "Policy loss",
    "grpo.old_policy": "Correction of the servers' log-probabilities",
    "grpo.kl_coef": "KL penalty and reference model",
    "grpo.entropy_coef": "Entropy bonus and supervised examples",
    "grpo.logprob_chunk_tokens": "Memory, speed, export and the end of a run",
    "critic.path": "A critic, for advantages by GAE",
    "rollout.max_head_offpolicyness": "Staleness and sampling",
    "rollout.segment_tokens": "Environments and long completions",
    "rollout.buffer_size_limit": "Batches and filters",
    "rollout.max_process_restarts": "Dispatch and failures",
    "rollout.record": "Record and replay",
    "environments": "Several environments in one run",
    "inference.kind": "Servers",
    "cluster": "Which GPUs train, and which have servers",
    "weight_sync.transport": "How weights reach the servers",
    "teacher.urls": "Distillation from a teacher",
    "sft.path": "Supervised training in place of rollouts",
    "guards.nonfinite": "What happens when a run goes wrong",
    "workers.pass_variables": "Processes that run your code",
    "observe.samples_per_step": "What a run prints and writes",
}
"""Headings by the setting that follows. A new user meets the tables in this order."""

FIRST_TABLES = tuple(dict.fromkeys(key.partition(".")[0] for key in HEADINGS))
# Torchtitan's tables that nearly every run sets, which come before its others.
OFTEN_SET = ("job", "training", "optimizer", "lr_scheduler", "parallelism", "checkpoint", "debug")

_MAX_WIDTH = 100
_INDENT = " " * 8
_EMPTY = ('""', "none", "[]", "{}")
# The short page leaves out settings whose docstrings begin so, since no run sets them.
_NOT_SHOWN = ("Must stay", "DEPRECATED")

USAGE = """\
usage: torchtitan-grpo train X.toml [--gpus N] [--table.key value ...]
       torchrun --rdzv-backend torchtitan_grpo --nproc_per_node N \\
           -m torchtitan.grpo_train \\
           --job.config_file X.toml [--table.key value ...]

Trains with the settings of X.toml. The command line takes precedence over the
file, and the file over the defaults. Paths, those in the file as well, are
relative to the folder in which the command is started.

  --gpus N       Number of training ranks, one for each GPU. Default: all visible
                 GPUs but those of the servers that inference.launch starts.
                 Without a GPU: --nproc N.
  --max-restarts N
                 When a rank has died, start all ranks again from the newest
                 checkpoint, at most N times. Default: 0.
  --dry-run      Print the resolved configuration and the layout, open what the run
                 would open (model, prompts, rewards) without servers, and exit.
  --help [WORD]  This page, or the full text of the settings whose names contain
                 WORD ("all": of every setting).

A list is given as A,B,C, a table as '{key = "value"}', None as none. A flag is
set by --table.key and cleared by --table.no-key.
"""


@dataclass(frozen=True)
class Setting:
    """One setting as the page shows it; ``bounds`` are empty if every value is valid."""

    key: str
    type: Any
    default: str
    doc: str
    bounds: str

    @property
    def table(self) -> str:
        return self.key.partition(".")[0]

    @property
    def head(self) -> str:
        table, _, name = self.key.rpartition(".")
        name = f"[no-]{name}" if is_flag(self.type) else name
        default = "" if self.default in _EMPTY else f"({self.default})"
        option = f"--{table}.{name}" if table else f"--{name}"
        return "  " + " ".join(filter(None, [option, metavar(self.type), default]))


def help_words(args: list[str]) -> list[str] | None:
    """Returns the words behind ``--help``; None if the command line does not ask for help."""
    for flag in ("--help", "-h"):
        if flag in args:
            behind = args[args.index(flag) + 1 :]
            return list(itertools.takewhile(lambda word: not word.startswith("-"), behind))
    return None


def page(config_type: type, words: list[str]) -> str:
    """Returns the page, or the full text of the settings whose names contain one of ``words``."""
    width = min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 24)).columns) - 1
    found = list(settings(config_type))
    if words:
        lines = [line for word in words for line in _in_full(found, word, width)]
        return "\n".join(lines)
    found = [setting for setting in found if not setting.doc.startswith(_NOT_SHOWN)]
    ours = [setting for setting in found if setting.table in FIRST_TABLES]
    theirs = [setting for setting in found if setting.table not in FIRST_TABLES]
    return "\n".join([USAGE, *_by_topic(ours, width), *_by_table(theirs, width)])


def settings(config_type: type) -> Iterator[Setting]:
    docs, tables = field_docs(config_type), {f.name: f for f in fields(config_type)}
    for name in dict.fromkeys([*FIRST_TABLES, *OFTEN_SET, *tables]):
        f = tables[name]
        if is_dataclass(f.type):
            yield from _of_table(f.type, name)
        else:  # tables whose names are the user's
            yield Setting(name, f.type, _default(f), docs.get(name, ""), "")


def _of_table(table: Any, name: str) -> Iterator[Setting]:
    docs, bounds = field_docs(table), bounds_of(table)
    for f in fields(table):
        key = f"{name}.{f.name}"
        if is_dataclass(f.type):
            yield from _of_table(f.type, key)
        else:
            range_ = str(bounds.get(f.name, ""))
            yield Setting(key, f.type, _default(f), docs.get(f.name, ""), range_)


def _default(f: Field) -> str:
    value = f.default_factory() if f.default_factory is not MISSING else f.default
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')


def _by_topic(found: list[Setting], width: int) -> Iterator[str]:
    for setting in found:
        if setting.key in HEADINGS:
            yield from ("", HEADINGS[setting.key])
        yield setting.head
        if setting.doc:
            yield from _wrapped(first_sentence(setting.doc), width)


def _by_table(found: list[Setting], width: int) -> Iterator[str]:
    yield from ("", "Torchtitan's settings (--help TABLE explains a table)")
    for table, of_table in itertools.groupby(found, lambda setting: setting.table):
        yield f"  --{table}."
        yield from _wrapped(", ".join(map(_name_in_table, of_table)), width)


def _name_in_table(setting: Setting) -> str:
    name = setting.key.partition(".")[2]
    shows_default = setting.table in OFTEN_SET and setting.default not in _EMPTY
    return f"{name} ({setting.default})" if shows_default else name


def _in_full(found: list[Setting], word: str, width: int) -> Iterator[str]:
    key = word.removeprefix("--").replace("-", "_")
    chosen = [s for s in found if key == "all" or s.table == key]
    chosen = chosen or [s for s in found if key in s.key]
    if not chosen:
        yield f"No setting's name contains {word!r}. --help without a word lists all of them."
    for setting in chosen:
        valid = f" Valid: {setting.bounds}." if setting.bounds else ""
        yield setting.head
        yield from _wrapped(setting.doc, width)
        yield from _wrapped(f"Default: {setting.default}.{valid}", width)


def _wrapped(text: str, width: int) -> list[str]:
    text = text.replace("``", "")
    return textwrap.wrap(
        text, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
    )
