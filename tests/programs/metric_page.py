# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the tables of docs/metrics.md, so that tests can compare them with what runs write."""

import functools
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"


class Metric(NamedTuple):
    """One key of a row. In ``key``, ``{name}`` stands for a part that depends on the run."""

    key: str
    unit: str
    meaning: str
    healthy: str
    otherwise: str

    def matches(self, key: str) -> bool:
        # An address may contain anything but a slash; a number is digits.
        parts = re.split(r"(\{\w+\})", self.key)
        pattern = "".join(
            re.escape(part) if i % 2 == 0 else r"\d+" if part == "{number}" else "[^/]+"
            for i, part in enumerate(parts)
        )
        return re.fullmatch(pattern, key) is not None


@functools.cache
def metrics() -> list[Metric]:
    rows = [line[2:-2] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
    found = []
    for first, *rest in cells:
        if len(rest) > 1:  # tables of two columns are about files
            keys, _, unit = first.rpartition(" (")
            found += [Metric(key, unit.rstrip(")"), *rest) for key in re.findall(r"`(.+?)`", keys)]
    return found


def undescribed(
    keys: Iterable[str], rewards: Collection[str] = (), own_loss: Collection[str] = ()
) -> list[str]:
    known = {"step", *own_loss, *(f"reward/{name}" for name in rewards)}
    rows = [metric for metric in metrics() if metric.key != "reward/{function}"]
    return [
        key
        for key in keys
        if key not in known and not any(m.matches(without_environment(key)) for m in rows)
    ]


def without_environment(key: str) -> str:
    """The page leaves out the name that a metric of one of several environments has in it."""
    return re.sub(r"^(environment|agent)/[^/]+/(?=[^/]+$)", r"\1/", key)
