# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The content of a run's report as plain data."""

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.grpo.commands.report import reading
from torchtitan.grpo.commands.report.advisories import Told, advisories
from torchtitan.grpo.commands.report.reading import Metrics, Record, Samples
from torchtitan.grpo.run_folder.contents import STARTS_FOLDER
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.folder_lock import LOCK_FILE, living_holder
from torchtitan.grpo.system.strict_json import finite

POINTS, _BUCKETS = 2000, 400
_MOST_VALUES = 200_000  # of all curves of a log
_OF_SERVERS = re.compile(
    r"servers/(.+)/(generating|prefill|paused|idle|lost|asleep|starting)_fraction"
    r"|servers/(.+)/(version|kv_use|running|waiting)|weight_sync/(server\d+)/(version|lag)"
)
_DEFAULT = "  # default: "
_FIRST_EVENTS, _LAST_EVENTS = 500, 1500


class Run:
    """A run's folder, whose files :meth:`update` reads on."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "metrics.jsonl").is_file():
            raise RunError(
                f"A report needs the folder of a run (job.dump_folder) with metrics.jsonl, got {folder}."
            )
        self.folder = folder
        self.metrics = Metrics(folder / "metrics.jsonl")
        self.evaluations = Metrics(folder / "evaluations.jsonl")
        self.samples = Samples(folder / "samples.jsonl")
        self.evaluation_samples = Samples(folder / "evaluation_samples.jsonl")
        self._tail = reading.Tail(folder / "events.jsonl", self._clear)
        self._clear()

    def _clear(self) -> None:
        self._events, self._num_events = list[Record](), 0

    def update(self) -> None:
        for log in (self.metrics, self.evaluations, self.samples, self.evaluation_samples):
            log.update()
        for _, line in self._tail.lines():
            if record := reading.as_record(line):
                self._num_events += 1
                self._events.append(record | {"text": str(record.get("text"))[:2000]})
                del self._events[_FIRST_EVENTS:-_LAST_EVENTS]

    def sizes(self) -> list[object]:
        """What differs after the run has written something, begun, or ended."""
        files = [file for file in self.folder.glob("*.json*") if file.is_file()]
        return [
            living_holder(self.folder / LOCK_FILE),
            *((f.name, f.stat().st_size) for f in files),
        ]

    def content(self) -> Record:
        starts, summary = list(_starts(self.folder)), _read_json(self.folder / "summary.json")
        values, settings, file = {}, [], None
        for start in starts:  # those of the last start are shown
            values, settings, file = (start.pop(name) for name in ("values", "settings", "file"))
        told = Told(self.metrics, self.evaluations, summary, values, file)
        logs = (self.metrics, self.evaluations)
        few = max(100, min(POINTS, _MOST_VALUES // max(1, len(self.metrics.columns))))
        last = {k: finite(c[-1]) for log in logs for k, c in log.columns.items() if c[-1] == c[-1]}
        return {
            "header": self._header(told, starts), "advisories": advisories(told), "last": last,
            "series": {k: _curve(log.steps, log.column(k), few) for log in logs for k in log.columns},
            "points": few,
            "spread": self._spread(), "clock": _clock(self.metrics), "shares": _shares(self.metrics),
            "late": {key: _short(told.late(key)) for key in self.metrics.columns}, "settings": settings,
            "starts": starts, "events": self._events, "num_events": self._num_events,
            "damaged": sum(log.num_damaged for log in logs), "dropped": summary.get("dropped") or {},
        }  # fmt: skip

    def _header(self, told: Told, starts: list[Record]) -> Record:
        scores = [_short(score) for score in self.evaluations.known("evaluation/score")] or [None]
        last = self.metrics.steps[-1] if self.metrics.steps else 0
        state = "ended" if told.summary.get("steps") == last else "stopped"
        if living_holder(self.folder / LOCK_FILE) is not None:
            state = "running"
        reward, seconds = "reward/mean", _clock(self.metrics)["y"] or [0]
        return {
            "name": self.folder.resolve().name, "description": told.setting("job", "description"),
            "model": told.setting("model", "hf_assets_path"), "state": state, "steps": last,
            "of_steps": told.setting("training", "steps"), "seconds": seconds[-1],
            "reward_first": _short(told.early(reward)), "reward_last": _short(told.late(reward)),
            "score_first": scores[0], "score_last": scores[-1],
            "started": starts[0].get("started") if starts else None,
        }  # fmt: skip

    def _spread(self) -> Record:
        """The lowest and the highest mean of a group, of the groups that samples.jsonl has of a step."""
        steps = sorted(step for step, means in self.samples.spreads.items() if means)
        found = [self.samples.spreads[step] for step in steps]
        low, high = np.array([min(means) for means in found]), np.array([max(m) for m in found])
        return {"low": _curve(steps, low, POINTS // 4), "high": _curve(steps, high, POINTS // 4)}


def _curve(steps: Any, values: np.ndarray, points: int) -> Record:
    x, y = reading.decimated(np.array(steps, dtype=np.int64), values, points)
    return {"x": np.diff(x, prepend=0).tolist(), "y": [_short(v) for v in y.tolist()]}


def _short(value: float) -> float | int | None:
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e9 else finite(short)


def _clock(metrics: Metrics) -> Record:
    """Seconds since the start after each step, without the time between starts."""
    key = "wall/total_seconds" if "wall/total_seconds" in metrics.columns else "time/step_seconds"
    column = metrics.column(key)
    passed = np.cumsum(np.where(np.isfinite(column), column, 0.0))
    return _curve(metrics.steps, passed, _BUCKETS)


def _shares(metrics: Metrics) -> Record:
    """What the trainer and each server did, as means over buckets of steps."""
    width = max(1, -(-len(metrics.steps) // _BUCKETS))

    def means(columns: dict[str, np.ndarray]) -> Record:
        return {k: [_short(v) for v in reading.bucket_means(c, width)] for k, c in columns.items()}

    trainer, waits = (
        {k: metrics.column(v) for k, v in metrics.matching(rf"{kind}/(.+)_seconds").items()}
        for kind in ("wall", "wait")
    )
    trainer.pop("total", None)
    servers = defaultdict[str, dict[str, np.ndarray]](dict)
    for key in metrics.columns:
        if match := _OF_SERVERS.fullmatch(key):
            name, kind = (group for group in match.groups() if group)
            servers[name][kind] = metrics.column(key)
    for kinds in servers.values():
        if "version" in kinds:
            kinds.setdefault("lag", metrics.column("policy_version") - kinds["version"])
    found = {"trainer": means(trainer), "waits": means(waits), "x": list(metrics.steps[::width])}
    return found | {"servers": {name: means(kinds) for name, kinds in servers.items()}}


def _starts(folder: Path) -> Iterator[Record]:
    found = [path for path in (folder / STARTS_FOLDER).glob("[0-9]*") if path.name.isdecimal()]
    before: Record | None = None
    for path in sorted(found, key=lambda path: int(path.name)):
        file, values = path / "config.toml", {}
        text = file.read_text("utf-8", "replace") if file.is_file() else ""
        with suppress(tomllib.TOMLDecodeError):
            values = tomllib.loads(text)
        settings = list(read_settings(text))
        texts = {f"{table}.{key}": value for table, key, value, _ in settings}
        changed = {k: v for k, v in texts.items() if before is not None and before.get(k) != v}
        before, number = texts, int(path.name)
        more = {
            "number": number,
            "settings": settings,
            "values": values,
            "changed": changed,
            "file": file,
        }
        yield _read_json(path / "environment.json") | more


def read_settings(text: str) -> Iterator[tuple[str, str, str, str | None]]:
    """Yields table, key, value as text, and the default as text or None, of a start's config.toml."""
    table = ""
    for line in text.splitlines():
        if match := re.fullmatch(r"\[(.+)\]", line):
            table = match[1]
        setting, mark, default = line.rpartition(_DEFAULT)
        # A value may hold the mark as well: in front of a comment, its quotes are closed.
        if not mark or len(re.findall(r'(?<!\\)(?:\\\\)*"', setting)) % 2:
            setting, default = line, None
        if match := re.fullmatch(r'(?:# )?("(?:[^"\\]|\\.)*"|[\w-]+) (?:=|is) (.*)', setting):
            yield table, match[1], match[2], default


def _read_json(file: Path) -> Record:
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(file.read_bytes())
        if isinstance(content, dict):
            return content
    return {}
