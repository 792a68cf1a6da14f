"""Spans that processes record: from many threads and processes, through kills and full disks."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from light import LIGHT

from torchtitan.grpo.system import spans

PROGRAM = f"""{LIGHT}
import sys, threading, time
from pathlib import Path
from torchtitan.grpo.system import spans

spans.open_inherited("worker")

def record(thread):
    for i in range(1000):
        with spans.span(f"track {{thread}}", "work", i=i):
            pass

threads = [threading.Thread(target=record, args=(t,)) for t in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("recorded", flush=True)
if sys.argv[1] == "hang":
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(spans.VARIABLE, "")  # restored afterwards
    yield
    spans.close_spans()


def start_worker(what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def lines_of(folder: Path, process: str = "*") -> list[list]:
    (file,) = (folder / "timeline").glob(f"{process}.*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def test_nothing_is_written_when_off(tmp_path: Path):
    assert not spans.is_on()
    spans.add("track", "name", 0.0, 1.0)
    with spans.span("track", "name"):
        pass
    spans.sync("moment")
    spans.open_inherited("worker")
    assert not spans.is_on() and not list(tmp_path.iterdir())


def test_spans_are_microseconds_behind_a_head(tmp_path: Path):
    (tmp_path / "starts" / "3").mkdir(parents=True)
    spans.open_spans(tmp_path, "rank 0")
    spans.add("training", "forward", 10.0, 10.5, step=3)
    spans.sync("begun")
    spans.close_spans()
    head, span, sync = lines_of(tmp_path, "rank_0")
    assert (head["process"], head["pid"], head["start"]) == ("rank 0", os.getpid(), 4)
    assert abs((head["time"] - head["monotonic"]) - (time.time() - time.monotonic())) < 1
    assert span == ["training", "forward", 10_000_000, 500_000, {"step": 3}]
    assert sync["sync"] == "begun"


def test_a_later_start_continues_the_file_of_an_equal_process_id(tmp_path: Path):
    spans.open_spans(tmp_path, "rank 0", 1)
    spans.open_spans(tmp_path, "rank 0", 2)
    spans.close_spans()
    assert [head["start"] for head in lines_of(tmp_path)] == [1, 2]


def test_threads_of_many_processes_lose_nothing(tmp_path: Path):
    spans.open_spans(tmp_path, "owner")
    workers = [start_worker("end") for _ in range(3)]
    assert [worker.communicate(timeout=120)[0] for worker in workers] == ["recorded\n"] * 3
    for worker in workers:
        (file,) = (tmp_path / "timeline").glob(f"worker.{worker.pid}.jsonl")
        head, *found = map(json.loads, file.read_text().splitlines())
        assert head["start"] == 1
        for thread in range(4):
            numbers = [args["i"] for track, *_, args in found if track == f"track {thread}"]
            assert numbers == list(range(1000))


def test_a_killed_process_keeps_all_but_its_last_batch(tmp_path: Path):
    spans.open_spans(tmp_path, "owner")
    worker = start_worker("hang")
    assert worker.stdout is not None and worker.stdout.readline() == "recorded\n"
    worker.send_signal(signal.SIGKILL)
    worker.wait(timeout=60)
    assert 4000 - 256 <= len(lines_of(tmp_path, "worker")) - 1 <= 4000


def test_a_full_disk_is_said_once_and_ends_only_the_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def write(file: int, text: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spans.open_spans(tmp_path, "rank 0")
    monkeypatch.setattr(os, "write", write)
    for _ in range(600):
        spans.add("track", "name", 0.0, time.monotonic())
    monkeypatch.undo()
    assert not spans.is_on()
    (record,) = caplog.records
    assert "is full" in record.getMessage() and str(tmp_path) in record.getMessage()


def test_a_folder_that_cannot_be_made_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "timeline").write_text("a file")
    spans.open_spans(tmp_path, "rank 0")
    assert not spans.is_on() and "has no timeline" in caplog.text


def test_a_file_has_a_largest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(spans, "_MAX_BYTES", 2**20)
    spans.open_spans(tmp_path, "rank 0")
    for i in range(50_000):
        spans.add("track", "name", 0.0, 1.0, number=i)
    assert not spans.is_on() and "has 1 MiB" in caplog.text
    (file,) = (tmp_path / "timeline").iterdir()
    assert 2**20 <= file.stat().st_size < 1.1 * 2**20


def test_a_thread_may_record_while_another_closes(tmp_path: Path):
    spans.open_spans(tmp_path, "rank 0")
    ends = threading.Event()

    def record() -> None:
        while not ends.is_set():
            spans.add("track", "name", 0.0, time.monotonic())

    thread = threading.Thread(target=record)
    thread.start()
    for _ in range(20):
        spans.open_spans(tmp_path, "rank 0")
    spans.close_spans()
    ends.set()
    thread.join()
    assert len(lines_of(tmp_path)) > 20


def test_short_steps_in_a_row_are_one_span(tmp_path: Path):
    spans.open_spans(tmp_path, "server")
    steps = spans.Merged("engine")
    for i in range(1500):
        steps.add("decode", i / 1000, (i + 1) / 1000)
    steps.add("prefill", 1.5, 1.6)
    steps.add("prefill", 5.0, 5.1)
    steps.flush()
    spans.close_spans()
    found = [(name, args["steps"]) for _, name, *_, args in lines_of(tmp_path)[1:]]
    assert found == [("decode", 1000), ("decode", 500), ("prefill", 1), ("prefill", 1)]
