"""The trace that is merged from the timelines of a run's processes.

Perfetto's own trace processor is not packaged for any registry that tests may use, so the trace is held
to the rules of Chrome's trace event format, with which Perfetto reads JSON.
"""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from torchtitan.grpo.commands.cli import run
from torchtitan.grpo.commands.timeline import merge

SECOND = 1_000_000
Event = dict[str, Any]


def write_process(
    run_folder: Path,
    process: str,
    spans: list[tuple],
    *,
    boot: str = "host a",
    monotonic: float = 0.0,
    wall: float = 1000.0,
    syncs: dict[str, float] | None = None,
    pid: int = 7,
) -> Path:
    """Writes the timeline of a process; ``spans`` are (track, name, begin, end, args) in seconds."""
    file = run_folder / "timeline" / f"{process.replace(' ', '_')}.{pid}.jsonl"
    file.parent.mkdir(exist_ok=True)
    head = {"process": process, "pid": pid, "host": boot, "boot": boot, "start": 1}
    lines: list[Any] = [head | {"time": wall + monotonic, "monotonic": monotonic}]
    lines += [{"sync": name, "monotonic": at} for name, at in (syncs or {}).items()]
    for track, name, begin, end, args in spans:
        lines.append([track, name, int(begin * SECOND), int((end - begin) * SECOND), args])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def merged(run_folder: Path) -> list[Event]:
    output = run_folder / "timeline.json.gz"
    merge(run_folder, output)
    trace = json.loads(gzip.decompress(output.read_bytes()))
    check_trace(trace)
    return trace["traceEvents"]


def check_trace(trace: dict[str, Any]) -> None:
    """Checks the rules of the format that Perfetto relies on."""
    events: list[Event] = trace["traceEvents"]
    named = {(e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X", "s", "t", "f"), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
            continue
        where = event["pid"], event["tid"]
        assert all(type(value) is int and value > 0 for value in where), event
        assert (event["pid"], None) in named and where in named, event
        assert type(event["ts"]) is int and event["ts"] >= 0, event
        if event["ph"] == "X":
            assert type(event["dur"]) is int and event["dur"] >= 0 and event["name"], event
            slices[where].append((event["ts"], event["ts"] + event["dur"]))
        else:
            flows[event["id"]].append(event)
    for of_thread in slices.values():  # slices of one thread must not overlap unless they nest
        of_thread.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(of_thread))
    for flow in flows.values():  # a flow begins, continues and ends inside slices, in this order
        assert "".join(e["ph"] for e in flow) in ("sf", "stf"), flow
        assert len({(e["name"], e["cat"]) for e in flow}) == 1
        times = [e["ts"] for e in flow]
        assert times == sorted(times)
        for event in flow:
            assert any(a <= event["ts"] <= b for a, b in slices[event["pid"], event["tid"]])


def names_of(events: list[Event], what: str) -> list[str]:
    return [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == f"{what}_name"]


def flows_of(events: list[Event], name: str) -> list[list[tuple[str, int]]]:
    """The slices (name and begin in seconds) that each flow of a name passes."""
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    flows = defaultdict(list)
    for e in events:
        if e["ph"] in "stf" and e["name"] == name:
            flows[e["id"]].append((slices[e["pid"], e["tid"], e["ts"]], e["ts"] // SECOND))
    return list(flows.values())


def test_overlapping_spans_get_rows_of_their_own(tmp_path: Path):
    requests = [("server a:1", "generate", b, e, {}) for b, e in [(0, 4), (1, 2), (1, 3), (2, 3)]]
    write_process(tmp_path, "rollouts", [*requests, ("batches", "trainer waits", 0, 9, {})])
    events = merged(tmp_path)
    assert names_of(events, "process") == ["rollouts (host a, pid 7, start 1)"]
    rows = ["server a:1 #1", "server a:1 #2", "server a:1 #3", "batches"]
    assert names_of(events, "thread") == rows
    ends = [e["dur"] // SECOND for e in events if e["ph"] == "X"]
    assert ends == [4, 1, 2, 1, 9]


def test_processes_of_two_hosts_meet_where_their_ranks_met(tmp_path: Path):
    # Wall clocks differ by 5 s, and monotonic ones by 500 s; both ranks left a barrier at once.
    a = [("training", "passes", 20, 21, {})]
    b = [("training", "passes", 520, 521, {})]
    write_process(tmp_path, "rank 0", a, monotonic=10.0, syncs={"met": 12.0})
    write_process(
        tmp_path, "rank 1", b, boot="host b", monotonic=510.0, wall=505.0, syncs={"met": 512.0}
    )
    write_process(tmp_path, "server x", [("engine", "decode", 520, 521, {})], boot="host b")
    begins = [e["ts"] for e in merged(tmp_path) if e["ph"] == "X"]
    assert begins == [0, 0, 0]


def test_without_a_meeting_wall_time_counts(tmp_path: Path):
    write_process(tmp_path, "rank 0", [("training", "passes", 20, 21, {})])
    write_process(tmp_path, "rank 1", [("training", "passes", 520, 521, {})], boot="b", wall=497.0)
    assert [e["ts"] for e in merged(tmp_path) if e["ph"] == "X"] == [3 * SECOND, 0]


def write_run(folder: Path) -> None:
    training = [
        ("training", "passes", 0, 2, {"step": 1}),
        ("training", "publish", 2, 3, {"step": 1}),
        ("weights a:1", "push", 3, 5, {"version": 1, "bytes": 100}),
        ("weights b:1", "push", 3, 6, {"version": 1, "bytes": 100}),
        ("training", "passes", 12, 14, {"step": 2}),
    ]
    rollouts = [
        ("server a:1", "generate", 1, 4, {"group": 4, "version": 0, "newest_version": 1}),
        ("server a:1", "generate", 5, 6, {"group": 5, "version": 1}),
        ("server a:1", "generate", 6, 8, {"group": 5, "version": 1}),
        ("server a:1", "generate", 6, 8, {"evaluation": True, "version": 1}),
        ("server a:1", "generate", 6, 7, {"group": 5, "failed": True}),
        ("rewards", "reward", 8, 9, {"group": 5}),
        ("rewards", "reward", 9, 10, {"group": 6}),
    ]
    write_process(folder, "rank 0", training)
    write_process(folder, "rank 1", training)
    write_process(folder, "rollouts", rollouts)
    lines = [{"step": 1, "trained": [2]}, {"step": 2, "trained": [5, 6]}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "ledger.jsonl").write_text(text + '{"step": 3, "trai')  # the run goes on


def test_a_version_flows_from_its_step_to_each_server(tmp_path: Path):
    write_run(tmp_path)
    versions = flows_of(merged(tmp_path), "version")
    assert versions == [
        [("publish", 2), ("push", 3), ("generate", 5)],
        [("publish", 2), ("push", 3)],  # nothing was generated there
    ]


def test_a_group_flows_from_its_last_request_to_the_step_that_learned_it(tmp_path: Path):
    write_run(tmp_path)
    groups = flows_of(merged(tmp_path), "group")
    assert groups == [
        [("generate", 6), ("reward", 8), ("passes", 12)],
        [("reward", 9), ("passes", 12)],
    ]


def test_damaged_lines_and_starts_with_equal_process_ids_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_process(tmp_path, "rank 0", [("training", "passes", 0, 1, {"step": 1})])
    first = file.read_bytes()
    cut = b'["training","backw'
    file.write_bytes(first + cut + b"\n" + first.replace(b'"start": 1', b'"start": 2') + b'["a')
    (tmp_path / "timeline" / "empty.1.jsonl").write_bytes(b"")
    (tmp_path / "timeline" / "noise.1.jsonl").write_bytes(b'\xff\xfe\n["a","b",1,1,{}]\n')
    assert run(["timeline", str(tmp_path), "-o", str(tmp_path / "trace.gz")]) == 0
    said = capsys.readouterr().out
    assert "2 spans of 2 processes, 3 damaged lines" in said and "ui.perfetto.dev" in said
    events = json.loads(gzip.decompress((tmp_path / "trace.gz").read_bytes()))["traceEvents"]
    assert [name[-8:] for name in names_of(events, "process")] == ["start 1)", "start 2)"]


def test_a_run_without_spans_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["timeline", str(tmp_path)]) == 2
    assert "observe.timeline" in capsys.readouterr().err
    write_process(tmp_path, "rank 0", [])  # no spans yet
    assert [e["ph"] for e in merged(tmp_path)] == ["M"]
