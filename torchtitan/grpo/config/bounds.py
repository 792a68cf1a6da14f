# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The range of valid values of a setting, written at its field.

    group_size: Annotated[int, at_least(1)] = 8
    clip_low: Annotated[float, at_least(0).below(1)] = 0.2
    top_k: Annotated[int, at_least(1).or_value(-1, "all tokens")] = -1

`config_checks/ranges.py` enforces the bounds once the command line has been applied to the TOML
file, and docs/configuration.md shows them. Parsers ignore them: they convert types alone.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """An interval of numbers, and at most one ``special`` value outside of it, with its meaning."""

    minimum: float
    includes_minimum: bool
    maximum: float | None = None
    includes_maximum: bool = False
    special: tuple[float, str] | None = None

    def below(self, maximum: float) -> "Bounds":
        return dataclasses.replace(self, maximum=maximum, includes_maximum=False)

    def at_most(self, maximum: float) -> "Bounds":
        return dataclasses.replace(self, maximum=maximum, includes_maximum=True)

    def or_value(self, value: float, meaning: str) -> "Bounds":
        return dataclasses.replace(self, special=(value, meaning))

    def allow(self, value: float | None) -> bool:
        """Returns whether a value is valid. None always is, and NaN never."""
        if value is None or (self.special is not None and value == self.special[0]):
            return True
        is_above = value >= self.minimum if self.includes_minimum else value > self.minimum
        if self.maximum is None:
            return is_above
        return is_above and (
            value <= self.maximum if self.includes_maximum else value < self.maximum
        )

    def __str__(self) -> str:
        text = f"{'at least' if self.includes_minimum else 'above'} {self.minimum:g}"
        if self.maximum is not None:
            text += f" and {'at most' if self.includes_maximum else 'below'} {self.maximum:g}"
        if self.special is not None:
            text += f", or {self.special[0]:g} ({self.special[1]})"
        return text


def at_least(minimum: float) -> Bounds:
    return Bounds(minimum, includes_minimum=True)


def above(minimum: float) -> Bounds:
    return Bounds(minimum, includes_minimum=False)


def bounds_of(table: type) -> dict[str, Bounds]:
    """Returns the bounds of those fields of a table that have bounds."""
    found = {}
    for field in dataclasses.fields(table):
        metadata: tuple[Any, ...] = getattr(field.type, "__metadata__", ())
        for part in metadata:
            if isinstance(part, Bounds):
                found[field.name] = part
    return found


def bounded_settings(table: Any, prefix: str = "") -> Iterator[tuple[str, Bounds, Any]]:
    """Yields key, bounds and value of each setting that has bounds, including those of inner tables."""
    if dataclasses.is_dataclass(table):
        for name, bounds in bounds_of(type(table)).items():
            yield f"{prefix}{name}", bounds, getattr(table, name)
    inner = vars(table) if dataclasses.is_dataclass(table) else table
    for name, value in inner.items():
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            yield from bounded_settings(value, f"{prefix}{name}.")
