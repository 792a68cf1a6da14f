# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A start that is killed, at whichever of its operations on files, loses no run.

Each operation of a start that replaces a run is the last one of a process, in turn. What was there
before must then be whole, and once the new run has taken a step, no start removes that.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.resume.resumption import check_new_run
from torchtitan.grpo.run_folder import start_record
from torchtitan.grpo.run_folder.contents import steps_in
from torchtitan.grpo.run_folder.folder import FolderError, RunFolder
from torchtitan.grpo.run_folder.replacing import Removal, earlier_runs
from torchtitan.grpo.system.folder_lock import FolderInUse, FolderLock

OLD = (
    "metrics.jsonl", "ledger.jsonl", "summary.json", "checkpoint/step-4/.metadata",
    "checkpoint/step-4/__0_0.distcp", "hf/step-4/config.json", "starts/1/environment.json",
    "starts/launch.json",
)  # fmt: skip
FOREIGN = ("notes.txt", "checkpoint/seed/x")
KILLED, DONE = 42, 0
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")
MOST_OPERATIONS = 500


def make_config(folder: Path, *, overwrite: bool = True) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.job.overwrite = overwrite
    config.grpo.stop_timeout_seconds = 0.1
    return config


def write_old(folder: Path, layout: str) -> None:
    """Writes a run with a checkpoint, of which parts may lie elsewhere."""
    if layout != "in place":
        elsewhere = folder.with_name("elsewhere")
        elsewhere.mkdir(parents=True)
        folder.mkdir()
        (folder / "checkpoint").symlink_to(elsewhere)
    for name in (*OLD, *FOREIGN):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"launch": "old"}\n' if path.suffix == ".json" else '{"step": 4}\n')


def old_place(folder: Path) -> Path | None:
    """Returns where the old run is whole, as a run's folder; None if it is nowhere."""

    def is_whole(place: Path, checkpoints: Path) -> bool:
        names = [place / name for name in OLD if not name.startswith("checkpoint")]
        names += [checkpoints / name for name in OLD if name.startswith("checkpoint")]
        return all(p.is_file() and p.read_text()[2:8] in ("launch", 'step":') for p in names)

    for place in (folder, *earlier_runs(str(folder))):
        checkpoints = place
        if place != folder and (place / "elsewhere.json").exists():
            (moved,) = json.loads((place / "elsewhere.json").read_text()).values()
            checkpoints = place / "links"
            checkpoints.mkdir(exist_ok=True)
            (checkpoints / "checkpoint").unlink(missing_ok=True)
            (checkpoints / "checkpoint").symlink_to(moved)
        if is_whole(place, checkpoints):
            shutil.rmtree(place / "links", ignore_errors=True)
            return place
    return None


def start(config: JobConfig) -> None:
    """What a start of a run does to its folder, to the first steps."""
    folder = RunFolder(config)
    done = steps_in(Path(config.job.dump_folder, "checkpoint")) if goes_on(folder, config) else []
    if not folder.is_restart and not config.job.overwrite and not done:
        check_new_run(config)
    folder.begin()
    begins = done[-1] if done else 0
    log = RunLog(Path(config.job.dump_folder, "metrics.jsonl"), begins)
    start_record.record_start(config, begins, [], [])
    log.add({"step": begins + 1, "is": "new"})
    removal = Removal(config)
    checkpoint = Path(config.job.dump_folder, f"checkpoint/step-{begins + 1}")
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / ".metadata").write_text("new")
    removal.close()
    log.close()
    folder.close(failed=False)


def goes_on(folder: RunFolder, config: JobConfig) -> bool:
    return folder.is_restart or not config.job.overwrite


def die_at(number: int, folder: Path) -> None:
    """Ends this process instead of its operation with this number on files below a folder."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        if not (is_write or event in CHANGES) or not isinstance(arguments[0], str | os.PathLike):
            return
        if str(folder) in str(Path(arguments[0]).absolute()):
            count += 1
            if count >= number:
                os._exit(KILLED)

    sys.addaudithook(hook)


def killed_at(number: int, config: JobConfig, folder: Path) -> bool:
    """Starts a run in a process that dies at an operation; returns whether it came so far."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            die_at(number, folder)
            start(config)
            status = DONE
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (KILLED, DONE)
    return status == KILLED


def of_launch(monkeypatch, name: str, count: int = 0) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))


@pytest.fixture(autouse=True)
def fast_record(monkeypatch) -> None:
    monkeypatch.setattr(start_record, "environment", lambda *_: {})
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the machine goes on
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHTITAN_GRPO_LAUNCH_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """New folders, each with an empty place for a run."""

    def make() -> Iterator[Path]:
        for number in range(1, MOST_OPERATIONS):
            (tmp_path / str(number)).mkdir()
            yield tmp_path / str(number) / "run"
        raise AssertionError("the start does not come to its end")

    return make()


def has_begun(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() and '"new"' in (
        folder / "metrics.jsonl"
    ).read_text()


@pytest.mark.parametrize(
    ("layout", "launch", "count", "overwrite"),
    [
        ("in place", "first", 1, True),  # torchrun starts the ranks again
        ("elsewhere", "first", 0, True),  # and below an agent that joined later
        ("in place", "second", 0, True),  # the user starts the same command again
        ("in place", "second", 0, False),  # or goes on
        ("elsewhere", "second", 1, True),  # something that may have started the run before
    ],
)
def test_a_kill_at_any_operation_loses_neither_run(
    folders, monkeypatch, layout, launch, count, overwrite
):
    for number, folder in enumerate(folders, start=1):
        write_old(folder, layout)
        of_launch(monkeypatch, "first")
        is_killed = killed_at(number, make_config(folder), folder.parent)
        begun = has_begun(folder)
        steps = (folder / "metrics.jsonl").read_text() if begun else ""
        checkpoint = folder / "checkpoint/step-1/.metadata"
        has_checkpoint = checkpoint.exists() and checkpoint.read_text() == "new"

        of_launch(monkeypatch, launch, count)
        config = make_config(folder, overwrite=overwrite)
        begins_again = RunFolder(config)
        assert begun or old_place(folder), f"operation {number} lost the old run"
        assert not begins_again.is_restart or old_place(folder) != folder, (
            "it would go on with that"
        )
        if begun and launch == "first":
            assert begins_again.is_restart, f"operation {number}: a restart that takes steps away"
        begins_again.begin()
        if begun and goes_on(begins_again, config):
            assert (folder / "metrics.jsonl").read_text() == steps
            assert checkpoint.exists() == has_checkpoint
        assert begun or old_place(folder), "until the new run has begun"
        begins_again.close(failed=True)
        for name in FOREIGN:
            assert (folder / name).is_file()
        assert not earlier_runs(str(folder), "replacing")
        if not is_killed:
            assert begun and has_checkpoint and number > 20
            return


def test_a_kill_while_an_interrupted_start_is_undone_loses_nothing(folders, monkeypatch, tmp_path):
    of_launch(monkeypatch, "first")
    template = tmp_path / "template/run"
    template.parent.mkdir()
    write_old(template, "in place")
    for number in range(1, MOST_OPERATIONS):  # until the old run is half moved
        if not killed_at(number, make_config(template), template.parent):
            break
        if (moving := earlier_runs(str(template), "replacing")) and len(
            list(moving[0].iterdir())
        ) > 3:
            break
    assert moving and not old_place(template)
    of_launch(monkeypatch, "second")
    for number, folder in enumerate(folders, start=1):
        shutil.copytree(template, folder)
        is_killed = killed_at(number, make_config(folder), folder.parent)
        begun = has_begun(folder)
        RunFolder(make_config(folder, overwrite=False)).close(failed=False)
        assert begun or old_place(folder), f"operation {number}"
        if not is_killed:
            return


def test_a_replaced_run_is_removed_once_the_next_one_has_begun(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    write_old(folder, "in place")
    of_launch(monkeypatch, "first")
    config = make_config(folder)
    failed = RunFolder(config)
    failed.begin()
    failed.close(failed=True)
    (aside,) = earlier_runs(str(folder))
    out = capsys.readouterr().out
    assert "was moved to" in out and "removed once this run has completed a step" in out
    assert f"is whole in {aside}" in out and f"--job.dump_folder {aside}" in out
    of_launch(monkeypatch, "second")
    start(make_config(folder, overwrite=False))
    assert earlier_runs(str(folder)) == [aside], "nobody asked for its removal since"
    of_launch(monkeypatch, "third")
    start(config)
    assert earlier_runs(str(folder), "replaced", "kept", "removing") == []
    assert has_begun(folder)


def test_what_a_later_attempt_replaces_is_kept(tmp_path, monkeypatch, capsys):
    """Its note of the launch may be lost, and the run its own."""
    folder = tmp_path / "run"
    write_old(folder, "in place")
    of_launch(monkeypatch, "first", count=1)
    start(make_config(folder))
    (kept,) = earlier_runs(str(folder))
    assert kept.name.startswith("kept-") and old_place(folder) == kept
    assert "It stays there" in capsys.readouterr().out


def test_a_replaced_run_that_another_one_goes_on_with_is_not_removed(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    write_old(folder, "in place")
    of_launch(monkeypatch, "first")
    failed = RunFolder(make_config(folder))
    failed.begin()
    failed.close(failed=True)
    (aside,) = earlier_runs(str(folder))
    other = RunFolder(make_config(aside, overwrite=False))
    of_launch(monkeypatch, "second")
    start(make_config(folder))
    assert aside.is_dir() and old_place(folder) == aside
    other.close(failed=False)


def test_a_run_that_is_being_evaluated_is_not_replaced(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    write_old(folder, "in place")
    (folder / "evaluate/step-4").mkdir(parents=True)
    evaluation = FolderLock(folder / "evaluate/step-4/run.lock", "x")
    evaluation.acquire(0.0, lambda _: None)
    of_launch(monkeypatch, "first")
    run = RunFolder(make_config(folder))
    with pytest.raises(FolderInUse, match="evaluates it"):
        run.begin()
    assert old_place(folder) == folder
    evaluation.release()
    run.begin()
    run.close(failed=False)


def test_a_run_that_cannot_be_moved_back_is_told_and_stays_where_it_is(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    write_old(folder, "in place")
    moving = folder / "replacing-20260101-000000-000000"
    (moving / "hf").mkdir(parents=True)
    shutil.copytree(folder / "hf/step-4", moving / "hf/step-4")
    (moving / "metrics.jsonl").write_text("{}")
    of_launch(monkeypatch, "first")
    with pytest.raises(FolderError, match=r"must be moved back first, but: .* exists already"):
        RunFolder(make_config(folder))
    assert (moving / "metrics.jsonl").is_file()
