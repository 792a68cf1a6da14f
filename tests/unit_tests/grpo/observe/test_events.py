# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""events.jsonl: which warnings and errors it has, across resumed runs and full disks."""

import errno
import json
import logging
from pathlib import Path

import pytest

from torchtitan.grpo.observe.events import FILE, Events


@pytest.fixture
def log(monkeypatch):
    log = logging.Logger("events")
    yield log


def lines(folder: Path) -> list[tuple[int, str, str]]:
    records = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    assert all(list(record) == ["step", "time", "level", "text"] for record in records)
    return [(record["step"], record["level"], record["text"]) for record in records]


def test_events_before_the_folder_is_known_and_after_the_end_are_kept(log, tmp_path):
    events = Events()
    log.addHandler(events)
    log.warning("a file %s is odd", "a.toml")
    log.info("no event")
    log.warning("of %d", "no use")  # shown on stderr, as by every handler
    events.close()  # a run that is refused writes nowhere
    events.begin(tmp_path, 4)
    events.step = 5
    log.error("lost \ud800")
    events.close()
    events.add("error", "the error that has ended the run")
    events.close()
    assert lines(tmp_path) == [
        (4, "warning", "a file a.toml is odd"),
        (5, "error", "lost ?"),
        (5, "error", "the error that has ended the run"),
    ]


def test_a_resumed_run_goes_on_with_the_file(log, tmp_path):
    for start, end in ((0, 4), (2, 3)):
        events = Events()
        log.handlers = [events]
        log.warning(f"start at {start}")
        events.begin(tmp_path, start)
        for step in range(start + 1, end + 1):
            events.step = step
            log.warning(f"step {step} after {start}")
        events.close()
    assert [text for _, _, text in lines(tmp_path)] == [
        *("start at 0", "step 1 after 0", "step 2 after 0"),
        *("start at 2", "step 3 after 2"),
    ]


def test_a_run_that_fails_before_its_first_step_leaves_its_error(tmp_path):
    (tmp_path / FILE).write_text('{"step": 7, "time": 1.0, "level": "error", "text": "old"}\n')
    events = Events()
    events.folder = tmp_path
    events.add("error", "No server is up.")
    events.close()
    assert lines(tmp_path) == [(7, "error", "old"), (0, "error", "No server is up.")]


def test_a_repeated_text_is_counted(log, tmp_path):
    events = Events()
    log.addHandler(events)
    events.begin(tmp_path, 0)
    for number in range(3000):
        log.warning("again")
        if number % 1000 == 0:
            log.warning(f"number {number}")
    events.close()
    texts = [text for _, _, text in lines(tmp_path)]
    assert texts == [
        *("again", "number 0", "again (10 times so far)", "again (100 times so far)"),
        *("again (1000 times so far)", "number 1000", "number 2000"),
    ]


def test_without_warnings_there_is_no_file(tmp_path):
    events = Events()
    events.begin(tmp_path, 0)
    events.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_delays_events(monkeypatch, tmp_path):
    root = logging.getLogger()
    events = Events()
    monkeypatch.setattr(root, "handlers", [events])
    events.begin(tmp_path, 0)
    assert events._log is not None
    stream, is_full = events._log._stream, True

    class Disk:
        def write(self, data: bytes) -> int:
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return stream.write(data)

        def __getattr__(self, name: str):
            return getattr(stream, name)

    events._log._stream = Disk()  # pyright: ignore[reportAttributeAccessIssue]
    for number in range(3):
        root.warning(f"warning {number}")
    is_full = False
    events.close()
    texts = [text for _, _, text in lines(tmp_path)]
    assert [text for text in texts if "cannot be written" not in text] == [
        f"warning {number}" for number in range(3)
    ]
    assert len(texts) == 4
