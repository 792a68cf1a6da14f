# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the logs of a run as they grow, without holding their records."""

import itertools
import json
import math
import os
import re
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.strict_json import finite

Record = dict[str, Any]

# Without the blanks, as samples are written, or with them, as they were.
_KEY = re.compile(rb'\{"step": ?(\d{1,15})(?:, ?"number": ?(\d{1,9}))?')
_REWARDS = re.compile(rb'"group_rewards": ?\[([-+.\deE, nul]*)\]')
_FIRST_GROUPS = 4  # each step has these before any step has more
_MOST_TEXT, _MOST_TOKENS = 20_000, 4_000
_MOST_MISSES = 20


def as_record(line: bytes) -> Record | None:
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        if (
            isinstance(record, dict)
            and type(step := record.get("step")) is int
            and 0 <= step < 1 << 53
        ):
            return record
    return None


class Tail:
    """Yields the complete lines that were added to a file since the last call, with their places."""

    def __init__(self, path: Path, begin_again: Callable[[], None]) -> None:
        self._path, self._begin_again = path, begin_again
        self._place, self._file = 0, -1

    def lines(self) -> Iterator[tuple[int, bytes]]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._file or state.st_size < self._place:
                self._place, self._file = 0, state.st_ino  # a resumed run replaces its logs
                self._begin_again()
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                place, self._place = self._place, self._place + len(line)
                yield place, line


class Metrics:
    """The numbers of ``metrics.jsonl`` or ``evaluations.jsonl`` in columns, one for each key.

    In a column, NaN stands for an absent metric, and infinity for null, which is a gap in the curve.
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, self._clear)
        self._clear()

    def _clear(self) -> None:
        self.num_damaged, self.steps = 0, array("q")
        self.columns = defaultdict[str, array](lambda: array("d", [math.nan]) * len(self.steps))

    def update(self) -> None:
        for _, line in self._tail.lines():
            record = as_record(line)
            if record is None:
                self.num_damaged += 1
                continue
            while self.steps and self.steps[-1] >= record["step"]:  # restarted ranks repeat steps
                for column in (self.steps, *self.columns.values()):
                    column.pop()
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float | None):
                    number = finite(value)
                    self.columns[key].append(math.inf if number is None else number)
            self.steps.append(record["step"])
            for column in self.columns.values():
                if len(column) < len(self.steps):
                    column.append(math.nan)

    def column(self, key: str) -> np.ndarray:
        return np.array(self.columns.get(key, [math.nan] * len(self.steps)))

    def known(self, key: str) -> np.ndarray:
        """Returns the finite values of a metric."""
        column = self.column(key)
        return column[np.isfinite(column)]

    def matching(self, pattern: str) -> dict[str, str]:
        """Returns the keys that match a pattern, by what its group matches."""
        found = ((re.fullmatch(pattern, key), key) for key in self.columns)
        return {match[1]: key for match, key in found if match}


def decimated(steps: np.ndarray, values: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most about ``points`` points: the least and the greatest of each bucket, and the last."""
    is_there = ~np.isnan(values)
    steps, values = steps[is_there], values[is_there]
    if len(values) <= points:
        return steps, values
    width = -(-len(values) // (points // 2))
    table = np.full((-(-len(values) // width), width), np.inf)
    table.flat[: len(values)] = values
    starts = np.arange(len(table)) * width
    high = np.where(np.isinf(table), -np.inf, table).argmax(1) + starts
    kept = np.unique([*(table.argmin(1) + starts), *high, len(values) - 1])
    return steps[kept], values[kept]


def bucket_means(values: np.ndarray, width: int) -> list[float]:
    """Returns the mean of each ``width`` values, where what is absent or null counts as 0."""
    known = np.where(np.isfinite(values), values, 0.0)
    return [float(known[i : i + width].mean()) for i in range(0, len(known), width)]


class Samples:
    """Where the groups of ``samples.jsonl`` or ``evaluation_samples.jsonl`` are, without their texts."""

    def __init__(self, path: Path) -> None:
        self._path, self._tail = path, Tail(path, self._clear)
        self._clear()

    def _clear(self) -> None:
        self.num_damaged = self.num_records = 0
        self._groups = array("q")  # step, place and length of each
        self._last: tuple[bytes, ...] = ()
        self.spreads = defaultdict[int, list[float]](list)  # means of the groups of a step

    def update(self) -> None:
        for place, line in self._tail.lines():
            found = _KEY.match(line)
            if found is None or not line.endswith(b"}\n"):
                self.num_damaged += 1
                continue
            self.num_records += 1
            if found[2] and found.groups() == self._last:
                self._groups[-1] = place + len(line) - self._groups[-2]
                continue
            self._last, step = found.groups(), int(found[1])
            self._groups.extend((step, place, len(line)))
            if rewards := _REWARDS.search(line):
                with suppress(ValueError, ZeroDivisionError):
                    known = [float(w) for w in rewards[1].split(b",") if b"null" not in w]
                    self.spreads[step].append(sum(known) / len(known))

    def pick(self, budget: int, first: int = 0, last: int = 1 << 60) -> tuple[bytes, Record]:
        """Returns whole groups as compressed JSON lines of at most ``budget`` bytes, and what is left out."""
        out, size, kept, missed, shown = list[bytes](), 0, 0, 0, set[int]()
        packer = zlib.compressobj(9, wbits=31)
        for step, place, length in self._in_order(first, last):
            lines, trial = self._slim_lines(place, length), packer.copy()
            packed = trial.compress(lines) + trial.flush(zlib.Z_SYNC_FLUSH)
            if size + len(packed) > budget:
                missed += 1
                if missed > _MOST_MISSES:
                    break
                continue
            packer, size, kept = trial, size + len(packed), kept + lines.count(b"\n")
            out.append(packed)
            shown.add(step)
        facts = {"kept": kept, "of": self.num_records, "damaged": self.num_damaged}
        facts |= {"steps": len(shown), "of_steps": len({*self._groups[::3]})}
        return b"".join([*out, packer.flush()]), facts

    def _in_order(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yields groups so that those before any break are of evenly spaced steps."""
        steps = defaultdict[int, list[tuple[int, int]]](list)
        for i in range(0, len(self._groups), 3):
            step, place, length = self._groups[i : i + 3]
            if first <= step <= last:
                steps[step].append((place, length))
        order = spread_evenly(sorted(steps))
        for part in (slice(_FIRST_GROUPS), slice(_FIRST_GROUPS, None)):
            yield from ((step, *group) for step in order for group in steps[step][part])

    def _slim_lines(self, place: int, length: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(place)
            found = [as_record(line) for line in file.read(length).splitlines()]
        texts = (strict_json.dumps(_slim(one), separators=(",", ":")) for one in found if one)
        return "".join(f"{text}\n" for text in texts).encode()


def spread_evenly(values: list[int]) -> list[int]:
    """Returns the first and the last value, then the one halfway, then those at quarters, and so on."""
    strides = (1 << i for i in range(len(values).bit_length(), -1, -1))
    halved = itertools.chain.from_iterable(values[::stride] for stride in strides)
    return list(dict.fromkeys([*values[:1], *values[-1:], *halved]))


def _slim(record: Record) -> Record:
    """Returns a record without what the page does not show, and with bounded texts and lists."""
    unused = ("group_rewards", *(("prompt", "completion") if record.get("context") else ()))
    return _bounded({key: value for key, value in record.items() if key not in unused})


def _bounded(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        return f"{value[:_MOST_TEXT]}… ({len(value) - _MOST_TEXT} more characters are in the file)"
    if isinstance(value, list):
        return [_bounded(one) for one in value[:_MOST_TOKENS]]
    if isinstance(value, dict):
        return {key: _bounded(one) for key, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value
