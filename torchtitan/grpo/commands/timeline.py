# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Merges what a run's processes recorded (`system/spans.py`) into one trace for Perfetto.

The files are read twice: for the times, 40 bytes a span, and for the events. Arrows follow each version, from
its step to its push and the first request that a server answered with it, and each group, from its last
request to its reward and the step that learned it.
"""

import argparse
import gzip
import heapq
import math
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.spans import FOLDER

_LEARNING, _PUBLISHING = ("passes", "optimizer"), ("optimizer", "publish")
_Files = list[tuple[Path, int]]
"""Paths, and the sizes up to which they are read: a run that goes on writes more meanwhile."""
_Found = dict[str, dict[Any, int]]
_Span = tuple[str, str, int, int, dict[str, Any]]
_Fact = dict[str, Any]
"""The head of a process's spans, or the end of a barrier at the moment ``sync``."""
_decode = msgspec.json.Decoder(_Span | _Fact).decode


class _Trained(msgspec.Struct):
    """A line of the ledger."""

    step: int
    trained: list[int]


def timeline(arguments: list[str]) -> int:
    """Merges a run's timeline (observe.timeline) into one trace for Perfetto."""
    parser = argparse.ArgumentParser("torchtitan-grpo timeline", description=timeline.__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="job.dump_folder of the run")
    parser.add_argument("-o", metavar="FILE", type=Path, help="default: RUN/timeline.json.gz")
    given = parser.parse_args(arguments)
    output: Path = given.o or given.run / "timeline.json.gz"
    spans = merge(given.run, output)
    print(
        f"{output}: {len(spans.begin)} spans of {len(spans.heads)} processes, {spans.num_damaged} damaged lines "
        "left out. Open it at https://ui.perfetto.dev, which sends it nowhere, or query it offline with the "
        "Python package perfetto."
    )
    return 0


def merge(run: Path, output: Path) -> "_Spans":
    files = [(path, path.stat().st_size) for path in sorted((run / FOLDER).glob("*.jsonl"))]
    if not files:
        raise RunError(f"RUN must be a run with observe.timeline, but {run / FOLDER} has no files.")
    spans = _Spans(files)
    partial = output.with_name(f"{output.name}.partial")
    with gzip.open(partial, "wb", compresslevel=3) as file:
        file.write(b'{"otherData":{"begin":"%b"},"traceEvents":[' % spans.date)
        for i, event in enumerate(_events(files, spans, run / "ledger.jsonl")):
            file.write((b",\n" if i else b"\n") + msgspec.json.encode(event))
        file.write(b"\n]}\n")
    os.replace(partial, output)
    return spans


def _read(files: _Files) -> Iterator[tuple[int, _Span | _Fact | None]]:
    """Reads each line with the number of its process; None for a damaged one, as of a killed process."""
    process = -1
    for path, size in files:
        first = process + 1
        with path.open("rb") as file:
            for text in iter(file.readline, b""):
                if file.tell() > size:
                    break
                line = None
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    line = _decode(text)
                process += isinstance(line, dict) and "sync" not in line
                if text.strip() and (line is None or process >= first):
                    yield process, line


class _Spans:
    """The times of all spans in the files' order, in microseconds since the first one, and their rows."""

    def __init__(self, files: _Files) -> None:
        self.heads: list[_Fact] = []
        self.num_damaged = 0
        self._moments = defaultdict[str, dict[str, float]](dict)
        tracks: dict[tuple[int, str], int] = {}
        track, begin, duration = array("i"), array("q"), array("q")
        for process, line in _read(files):
            if isinstance(line, tuple):
                track.append(tracks.setdefault((process, line[0]), len(tracks)))
                begin.append(line[2])
                duration.append(max(line[3], 0))
            elif line is None:
                self.num_damaged += 1
            elif "sync" in line:
                of_hosts, boot = self._moments[line["sync"]], self.heads[process]["boot"]
                of_hosts[boot] = min(line["monotonic"], of_hosts.get(boot, math.inf))
            else:
                self.heads.append(line)
        offsets = self._clock_offsets()
        shifts = np.array([offsets[self.heads[process]["boot"]] for process, _ in tracks]) * 1e6
        self._track = np.array(track, np.int32)
        self.begin = np.array(begin) + shifts.astype(np.int64)[self._track]
        first = int(self.begin.min(initial=2**52))
        self.date = datetime.fromtimestamp(first / 1e6, UTC).isoformat().encode()
        self.begin -= first
        self.end = self.begin + np.array(duration)
        self._thread = np.zeros(len(begin), np.int32)
        self.threads: list[tuple[int, str]] = []
        self._lay_out(list(tracks))

    def place(self, number: int) -> dict[str, int]:
        thread = int(self._thread[number])
        pid = self.threads[thread][0] + 1  # 0 is the idle process of a system
        return {"ts": int(self.begin[number]), "pid": pid, "tid": thread + 1}

    def _clock_offsets(self) -> dict[str, float]:
        """What makes wall time of each host's clock; where the ranks met, that of rank 0's host."""
        offsets: dict[str, float] = {}
        for head in sorted(self.heads, key=lambda head: head["monotonic"]):
            offsets.setdefault(head["boot"], head["time"] - head["monotonic"])
        lead = next((head["boot"] for head in self.heads if head["process"] == "rank 0"), None)
        for of_hosts in self._moments.values():
            if lead in of_hosts:
                met = offsets[lead] + of_hosts[lead]
                offsets |= {boot: met - at for boot, at in of_hosts.items()}
        return offsets

    def _lay_out(self, tracks: Sequence[tuple[int, str]]) -> None:
        order = np.lexsort((-self.end, self.begin, self._track))
        bounds = np.searchsorted(self._track[order], np.arange(len(tracks) + 1))
        for (process, track), (a, b) in zip(tracks, pairwise(bounds), strict=True):
            chosen = order[a:b]
            rows = _rows(*(of[chosen].tolist() for of in (self.begin, self.end)))
            self._thread[chosen] = np.array(rows) + len(self.threads)
            shown = (
                [track] if max(rows) == 0 else [f"{track} #{i + 1}" for i in range(max(rows) + 1)]
            )
            self.threads += ((process, name) for name in shown)


def _rows(begins: list[int], ends: list[int]) -> list[int]:
    """Returns for each span, sorted by begin, the first row whose spans have all ended."""
    rows: list[int] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for begin, end in zip(begins, ends, strict=True):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows.append(heapq.heappop(free) if free else len(busy))
        heapq.heappush(busy, (end, rows[-1]))
    return rows


def _events(files: _Files, spans: _Spans, ledger: Path) -> Iterator[dict[str, Any]]:
    """The events of Chrome's trace format."""
    for pid, head in enumerate(spans.heads, 1):
        name = "{process} ({host}, pid {pid}, start {start})".format_map(head)
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for tid, (process, name) in enumerate(spans.threads, 1):
        named = {"ph": "M", "name": "thread_name", "args": {"name": name}}
        yield named | {"pid": process + 1, "tid": tid}
    found, number = defaultdict[str, dict[Any, int]](dict), 0
    for process, line in _read(files):
        if isinstance(line, tuple):
            duration = int(spans.end[number] - spans.begin[number])
            of_all = {"ph": "X", "name": line[1], "dur": duration, "args": line[4]}
            yield of_all | spans.place(number)
            _note(found, number, spans.heads[process]["process"], line)
            number += 1
    for i, (name, told) in enumerate(_flows(found, ledger)):
        steps = [number for number in told if number is not None]
        if len(steps) > 1 and all(spans.begin[a] <= spans.begin[b] for a, b in pairwise(steps)):
            for kind, number in zip(["s", *"t" * (len(steps) - 2), "f"], steps, strict=True):
                flow = {"ph": kind, "id": i, "name": name, "cat": "flow", "bp": "e"}
                yield flow | spans.place(number)


def _note(found: _Found, number: int, process: str, span: _Span) -> None:
    """Notes a span that a version or a group passes."""
    track, name, _, _, args = span
    version, step = args.get("version"), args.get("step")
    key = version, track.partition(" ")[2]
    if track == "training" and process == "rank 0":
        if name in _LEARNING:
            found["learn"].setdefault(step, number)
        if name in _PUBLISHING:
            found["publish"][step if version is None else version] = number
    elif name == "push" and version is not None:
        found["push"].setdefault(key, number)
    elif name == "generate" and version is not None:
        found["generate"][args.get("group")] = number  # the last one to end
        found["answer"].setdefault(key, number)
    elif name == "reward":
        found["reward"][args.get("group")] = number


def _flows(found: _Found, ledger: Path) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    for key, pushed in found["push"].items():
        yield "version", (found["publish"].get(key[0]), pushed, found["answer"].get(key))
    learned: dict[int, int | None] = {}
    for text in ledger.read_bytes().splitlines() if ledger.is_file() else ():
        with suppress(msgspec.DecodeError, UnicodeDecodeError):  # the last line may be incomplete
            line = msgspec.json.decode(text, type=_Trained)
            learned |= dict.fromkeys(line.trained, found["learn"].get(line.step))
    for group, rewarded in found["reward"].items():
        yield "group", (found["generate"].get(group), rewarded, learned.get(group))
