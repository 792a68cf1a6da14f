# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The page of ``--help``: this project's settings by topic, then torchtitan's."""

import itertools
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

from torchtitan.grpo.command_line.topics import FIRST_TABLES, HEADINGS, OFTEN_SET
from torchtitan.grpo.command_line.values import alternatives, bare_type, is_flag, is_list, is_table
from torchtitan.grpo.config.bounds import bounds_of
from torchtitan.grpo.config.field_docs import field_docs, first_sentence

_MAX_WIDTH = 100
_INDENT = " " * 8
_EMPTY = ('""', "none", "[]", "{}")
# How the docstrings begin of settings that the short page leaves out, since no run sets them.
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
    """One setting as the page shows it.

    Attributes:
        key: ``table.name``.
        type: Its type.
        default: Its default as it is written in TOML.
        doc: Its docstring in one line.
        bounds: The range of its values in words; empty if every value is valid.
    """

    key: str
    type: Any
    default: str
    doc: str
    bounds: str

    @property
    def table(self) -> str:
        return self.key.partition(".")[0]


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
    """Yields all settings, in the order of the page."""
    tables = {f.name: f.type for f in fields(config_type)}
    first = [*FIRST_TABLES, *OFTEN_SET]
    for name in [*first, *(name for name in tables if name not in first)]:
        yield from _of_table(tables[name], name)


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


def metavar(annotation: Any) -> str:
    """Returns what stands for the value of a setting, such as ``N`` or ``auto|cpu|cuda``."""
    names = []
    for member in alternatives(annotation):
        if get_origin(member) is Literal:
            names.append("|".join(map(str, get_args(member))))
        elif is_list(member):
            names.append("A,B,...")
        elif is_table(member):
            names.append("{key = value}")
        elif member is not type(None):
            names.append(
                {int: "N", float: "X", str: "TEXT", bool: ""}.get(bare_type(member), "VALUE")
            )
    return names[0]


def _head(setting: Setting) -> str:
    table, _, name = setting.key.rpartition(".")
    value = metavar(setting.type)
    if is_flag(setting.type):
        name = f"[no-]{name}"
    shown = [
        f"--{table}.{name}",
        value,
        "" if setting.default in _EMPTY else f"({setting.default})",
    ]
    return "  " + " ".join(filter(None, shown))


def _by_topic(found: list[Setting], width: int) -> Iterator[str]:
    for setting in found:
        if setting.key in HEADINGS:
            yield from ("", HEADINGS[setting.key])
        yield _head(setting)
        yield from _wrapped(_opening(setting.doc), width)


def _opening(doc: str) -> str:
    return first_sentence(doc).replace("``", "") if doc else ""


def _wrapped(text: str, width: int, indent: str = _INDENT) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _by_table(found: list[Setting], width: int) -> Iterator[str]:
    yield ""
    yield "Torchtitan's settings (--help TABLE explains a table)"
    for table in dict.fromkeys(setting.table for setting in found):
        names = [_name_in_table(s) for s in found if s.table == table]
        yield f"  --{table}."
        yield from _wrapped(", ".join(names), width)


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
        yield _head(setting)
        yield from _wrapped(setting.doc.replace("``", ""), width)
        facts = [f"Default: {setting.default}."]
        if setting.bounds:
            facts.append(f"Valid: {setting.bounds}.")
        yield from _wrapped(" ".join(facts), width)
