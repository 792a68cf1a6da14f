# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes docs/configuration.md from the tables in `torchtitan/grpo/config/`.

usage: python scripts/make_configuration_doc.py [--check]
With --check nothing is written, and the exit status is 1 if the page is out of date.
"""

import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from torchtitan.grpo import config
from torchtitan.grpo.config.bounds import bounds_of
from torchtitan.grpo.config.field_docs import field_docs
from torchtitan.grpo.job_config import JobConfig

REPOSITORY = Path(__file__).resolve().parents[1]
TARGET = REPOSITORY / "docs/configuration.md"

HEAD = """# Configuration

A run is configured by a TOML file: `torchtitan-grpo train X.toml`, or `--job.config_file X.toml` under
torchrun. Every key can be overridden on the command line as `--table.key value` or `--table.key=value`.
The command line takes precedence over the file, and the file over the defaults. All paths, including those
in the file, are relative to the folder in which the command is started.

| type | on the command line |
|---|---|
| `bool` | `--table.key`, `--table.no-key`, or `=true` and `=false` |
| `list` | `A,B,C`, several words `A B C`, or an array `'["A", "B"]'` as in TOML or JSON |
| `dict` | `'{key = "value"}'` as in TOML, or as in JSON; `--table.key.inner value` sets one entry |
| what may be `None` | `none` |

`torchtitan-grpo train --help` lists all settings, and `--help WORD` explains those whose names contain WORD. Besides the tables below there are
[torchtitan's own](https://github.com/pytorch/torchtitan): `[job]`, `[model]`, `[training]`,
`[optimizer]`, `[lr_scheduler]`, `[parallelism]`, `[checkpoint]`, `[metrics]`,
`[activation_checkpoint]`, `[compile]`, `[comm]`, `[profiling]`, `[debug]`.

`--dry-run` prints the resolved configuration, the planned layout, and where the run would begin (anew,
or from which checkpoint and with which changes). Then it opens what the run would open (prompts, columns, reward
functions, environment, tokenizer, and the headers of the weights) with the run's own code, lists it, and exits. No
server is started, and nothing is written to `job.dump_folder`. Each start of a run keeps its resolved
configuration in `<dump_folder>/starts/N/config.toml` ([how to resume](how-to/resume.md)).
`torchtitan-grpo check-config X.toml` does the same without torchrun. Mistakes are reported before any
process group exists. For a misspelt key, the message gives the nearest valid key; for a name of TRL, verl,
prime-rl, slime or AReaL, the name that the setting has here; for a value outside of its valid range, the
range; and for settings that contradict each other, the keys of both.

`model.hf_assets_path` names a Hugging Face directory (config.json, tokenizer.json, safetensors), or a model
on the Hub, `organisation/name` or `organisation/name@revision`, which is taken from huggingface_hub's cache
or downloaded there. The architecture and all sizes are read from it. Torchtitan's `model.name` and `model.flavor` are not
used.

In the column "valid", a value with a meaning of its own stands in front of that meaning: "at least 1,
or 0 (off)". No entry means that any value of the type is valid as far as the key alone is concerned.

This page is made by `python scripts/make_configuration_doc.py` from `torchtitan/grpo/config/` and
`torchtitan/grpo/job_config.py`.
"""

DEFAULTS_HEAD = """## Torchtitan's tables

Torchtitan's defaults are those of pretraining. These keys have other defaults here, or bounds;
`--dry-run` names torchtitan's default beside each. All other keys of these tables are as in torchtitan.

| key | type | default | torchtitan's | valid | meaning |
|---|---|---|---|---|---|"""


def page() -> str:
    """Returns the whole page."""
    tables = [f.type for f in fields(JobConfig) if f.type in vars(config).values()]
    return "\n".join([HEAD, changed_tables(), *map(section, tables)])


def changed_tables() -> str:
    """Returns the keys of torchtitan's tables that this project defines anew, as a section."""
    lines = [DEFAULTS_HEAD]
    for table in fields(JobConfig):
        cls: Any = table.type
        if cls.__module__ != JobConfig.__module__:
            continue
        bounds, docs, upstream = bounds_of(cls), field_docs(cls), cls.__base__()
        lines += [
            f"| `{table.name}.{f.name}` | `{in_markdown(type_name(f.type))}` | `{default_of(f)}` "
            f"| {_of_upstream(upstream, f.name)} | {in_markdown(str(bounds.get(f.name, '')))} "
            f"| {in_markdown(docs[f.name])} |"
            for f in fields(cls)
            if f.name in cls.__annotations__
        ]
    return "\n".join(lines) + "\n"


def _of_upstream(upstream: Any, name: str) -> str:
    """Returns torchtitan's default of a key; nothing for a key that only this project has."""
    return f"`{getattr(upstream, name)!r}`" if hasattr(upstream, name) else ""


def section(table: Any) -> str:
    """Returns one TOML table as a section."""
    assert is_dataclass(table)
    summary = (table.__doc__ or "").splitlines()[0]
    bounds, docs = bounds_of(table), field_docs(table)  # pyright: ignore[reportArgumentType]
    lines = [f"## {in_markdown(summary)}", ""]
    lines += ["| key | type | default | valid | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{f.name}` | `{in_markdown(type_name(f.type))}` | `{default_of(f)}` "
        f"| {in_markdown(str(bounds.get(f.name, '')))} | {in_markdown(docs[f.name])} |"
        for f in fields(table)
    ]
    return "\n".join(lines) + "\n"


def type_name(annotation: Any) -> str:
    """Returns a type as it is written in the source."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    name = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else ""
    return name or str(annotation).replace("typing.", "")


def default_of(field: Field) -> str:
    """Returns a field's default as it is written in Python."""
    if field.default_factory is not MISSING:
        return repr(field.default_factory())
    return repr(field.default)


def in_markdown(text: str) -> str:
    """Returns a docstring in the form that a table of Markdown takes."""
    return text.replace("``", "`").replace("|", "\\|")


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text() != page())
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
