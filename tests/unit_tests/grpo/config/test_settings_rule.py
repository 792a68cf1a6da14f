"""Every setting that this project adds is used, measured, or said to be experimental."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchtitan.grpo.config import SECRETS, frame
from torchtitan.grpo.config.command_line.keys import row_type
from torchtitan.grpo.config.field_docs import field_docs
from torchtitan.grpo.config.job_config import JobConfig

# To add a setting, take one away, or make one useful enough for a shipped file.
MOST_SETTINGS, MOST_EXPERIMENTAL = 238, 54
MARK = "Experimental: "
FRAME = tuple(vars(frame).values())
OWN_IN_FRAME = (
    *("job.overwrite", "checkpoint.save_failure", "optimizer.muon_lr", "optimizer.muon_adjust_lr"),
    *("optimizer.muon_dtype", "optimizer.offload_while_lent"),
    *("parallelism.fsdp_between_microbatches", "parallelism.pipeline_fill_jobs"),
)
"""This project's settings in tables that have the keys of torchtitan 0.2."""
MEASURED = re.compile(r"Measured by ``(benchmarks/\w+\.py)``\.")


def own_settings() -> dict[str, str]:
    """The docstrings of settings by key, without those of torchtitan; rows of a table count once."""
    docs: dict[str, str] = {}

    def add(table: Any, prefix: str) -> None:
        texts = field_docs(table)
        for field in fields(table):
            key, row = prefix + field.name, row_type(field.type)
            if hasattr(field.type, "__dataclass_fields__"):
                add(field.type, f"{key}.")
            elif table not in FRAME or key in OWN_IN_FRAME:
                docs[key] = texts[field.name]
            if row is not None:
                add(row, f"{key}.*.")

    add(JobConfig, "")
    return docs


def keys_in(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield prefix + key
        if isinstance(value, dict):
            # The names of these tables are the user's.
            inner = {"cluster": "cluster.*.", "evaluation.sets": "evaluation."}.get(prefix + key)
            for name, row in value.items() if inner or prefix + key == "environments" else ():
                yield from keys_in(row, inner or "") if isinstance(row, dict) else (name,)
            yield from keys_in(value, f"{prefix}{key}.")


def used_keys(repository: Path) -> set[str]:
    """Keys that a shipped TOML sets, or that a shipped script sets on a command line."""
    used = set()
    for file in repository.glob("train_configs/*.toml"):
        used |= set(keys_in(tomllib.loads(file.read_text())))
    for folder in ("scripts", "examples"):
        for file in (f for f in (repository / folder).rglob("*") if f.is_file()):
            text = file.read_bytes().decode(errors="replace")
            used |= set(re.findall(r"--([a-z_]+\.[a-z_.]+)", text))
    return used


def test_every_setting_is_used_or_measured_or_experimental(repository: Path):
    docs, used = own_settings(), used_keys(repository)
    results = (repository / "benchmarks/RESULTS.md").read_text()
    secrets = {".".join(key) for key in SECRETS}  # which stand in no file
    wrong = []
    for key, text in docs.items():
        in_results = re.search(rf"\b{re.escape(key)}\b", results) is not None
        if (benchmark := MEASURED.search(text)) is not None:
            in_results = benchmark[1] in results
            if not in_results:
                wrong.append(f"{key}: benchmarks/RESULTS.md has no row of {benchmark[1]}")
        is_used = key in used or key in secrets or in_results
        if is_used == text.startswith(MARK):
            wrong.append(
                f"{key}: {'is used or measured: remove' if is_used else 'set it in a shipped TOML, or write'} "
                f"{MARK!r} at the beginning of its docstring"
            )
    assert not wrong, "\n".join(wrong)


def test_there_are_not_more_settings_than_before():
    docs = own_settings()
    assert len(docs) <= MOST_SETTINGS
    assert sum(text.startswith(MARK) for text in docs.values()) <= MOST_EXPERIMENTAL
