# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A start that is killed, at whichever of its operations on files, loses no run."""

import itertools
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan.grpo.config.job_config import JobConfig
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
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")


def make_config(folder: Path, *, overwrite: bool = True) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.job.overwrite = overwrite
    config.grpo.stop_timeout_seconds = 0.1
    return config


def write_old(folder: Path, layout: str) -> None:
    if layout != "in place":
        elsewhere = folder.with_name("elsewhere")
        elsewhere.mkdir(parents=True)
        folder.mkdir()
        (folder / "checkpoint").symlink_to("../elsewhere")
    for name in (*OLD, *FOREIGN):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"launch": "old"}\n' if path.suffix == ".json" else '{"step": 4}\n')


def old_place(folder: Path) -> Path | None:
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
    folder = RunFolder(config)
    done = (
        steps_in(Path(config.job.dump_folder, "checkpoint"))
        if (folder.is_restart or not config.job.overwrite)
        else []
    )
    if not folder.is_restart and not config.job.overwrite and not done:
        check_new_run(config)
    folder.begin()
    begins = done[-1] if done else 0
    log = RunLog(Path(config.job.dump_folder, "metrics.jsonl"), begins)
    start_record.record_start(config, begins, [], [])
    log.add({"step": begins + 1, "is": "new"})
    Removal(config).close()
    checkpoint = Path(config.job.dump_folder, f"checkpoint/step-{begins + 1}")
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / ".metadata").write_text("new")
    log.close()
    folder.close(failed=False)


def states_of_a_start(place: Path, states: Path, config: JobConfig) -> list[Path]:
    """Starts a run in a process of its own; returns copies of ``place`` before each operation on files."""
    states.mkdir()
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            copy = copies_before_changes(place, states)
            start(config)
            copy()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    return sorted(states.iterdir(), key=lambda path: int(path.name))


def copies_before_changes(place: Path, states: Path) -> Callable[[], None]:
    seen: set[str] = set()
    is_copying = False

    def copy() -> None:
        state = states / str(len(seen))
        shutil.copytree(place, state, symlinks=True, ignore=shutil.ignore_patterns("run.lock"))
        files = sorted(state.rglob("*"))
        tree = repr([(str(f.relative_to(state)), f.is_file() and f.read_text()) for f in files])
        if tree in seen:
            shutil.rmtree(state)
        seen.add(tree)

    def hook(event: str, arguments: tuple) -> None:
        nonlocal is_copying
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
        if is_copying or not (is_write or event in CHANGES):
            return
        if str(place) in str(arguments[0]):
            is_copying = True
            copy()
            is_copying = False

    sys.addaudithook(hook)
    return copy


def put(state: Path, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(state, place, symlinks=True)
    return place / "run"


def of_launch(monkeypatch, name: str, count: int = 0) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> None:
    """What is removed by mistake, such as the path "", must not be the folder that tests run in."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def fast_record(monkeypatch) -> None:
    monkeypatch.setattr(start_record, "environment", lambda *_: {})
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the machine goes on
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHTITAN_GRPO_LAUNCH_ID"):
        monkeypatch.delenv(name, raising=False)


def has_begun(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.is_file() and '"new"' in metrics.read_text()


STARTED_AGAIN = {
    "in place": [
        ("first", 1, True),  # torchrun starts the ranks again
        ("second", 0, True),  # the user starts the same command again
        ("second", 0, False),  # or goes on
    ],
    "elsewhere": [
        ("first", 0, True),  # below an agent that joined later
        ("second", 1, True),  # something that may have started the run before
    ],
}


@pytest.mark.parametrize("layout", STARTED_AGAIN)
def test_a_kill_at_any_operation_loses_neither_run(tmp_path, monkeypatch, layout):
    place = tmp_path / "place"
    place.mkdir()
    write_old(place / "run", layout)
    of_launch(monkeypatch, "first")
    states = states_of_a_start(place, tmp_path / "states", make_config(place / "run"))
    assert len(states) > 20
    for state, again in itertools.product(states, STARTED_AGAIN[layout]):
        check_start_after_kill(monkeypatch, put(state, place), *again)
    folder = put(states[-1], place)
    assert has_begun(folder) and (folder / "checkpoint/step-1/.metadata").read_text() == "new"


def check_start_after_kill(monkeypatch, folder: Path, launch: str, count: int, overwrite: bool):
    begun = has_begun(folder)
    steps = (folder / "metrics.jsonl").read_text() if begun else ""
    checkpoint = folder / "checkpoint/step-1/.metadata"
    has_checkpoint = checkpoint.exists() and checkpoint.read_text() == "new"

    of_launch(monkeypatch, launch, count)
    config = make_config(folder, overwrite=overwrite)
    begins_again = RunFolder(config)
    assert begun or old_place(folder), "the old run is lost"
    assert not begins_again.is_restart or old_place(folder) != folder, "it would go on with that"
    if begun and launch == "first":
        assert begins_again.is_restart, "a restart takes steps away"
    begins_again.begin()
    if begun and (begins_again.is_restart or not overwrite):
        assert (folder / "metrics.jsonl").read_text() == steps
        assert checkpoint.exists() == has_checkpoint
    assert begun or old_place(folder), "until the new run has begun"
    begins_again.close(failed=True)
    for name in FOREIGN:
        assert (folder / name).is_file()
    assert not earlier_runs(str(folder), "replacing")


def test_a_kill_while_an_interrupted_start_is_undone_loses_nothing(tmp_path, monkeypatch):
    of_launch(monkeypatch, "first")
    place = tmp_path / "place"
    place.mkdir()
    write_old(place / "run", "in place")
    config = make_config(place / "run")
    for state in states_of_a_start(place, tmp_path / "states", config):
        moving = earlier_runs(str(state / "run"), "replacing")
        if moving and len(list(moving[0].iterdir())) > 3:
            break
    folder = put(state, place)
    assert moving and not old_place(folder)
    of_launch(monkeypatch, "second")
    for again in states_of_a_start(place, tmp_path / "again", config):
        put(again, place)
        begun = has_begun(folder)
        RunFolder(make_config(folder, overwrite=False)).close(failed=False)
        assert begun or old_place(folder)


def fail_over(folder: Path, monkeypatch) -> Path:
    write_old(folder, "in place")
    of_launch(monkeypatch, "first")
    failed = RunFolder(make_config(folder))
    failed.begin()
    failed.close(failed=True)
    (aside,) = earlier_runs(str(folder))
    return aside


def test_a_replaced_run_is_removed_once_the_next_one_has_begun(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    aside = fail_over(folder, monkeypatch)
    assert f"--job.dump_folder {aside}" in capsys.readouterr().out
    of_launch(monkeypatch, "second")
    start(make_config(folder, overwrite=False))
    assert earlier_runs(str(folder)) == [aside], "nobody asked for its removal since"
    of_launch(monkeypatch, "third")
    start(make_config(folder))
    assert earlier_runs(str(folder), "replaced", "kept", "removing") == []
    assert has_begun(folder)


NOT_OURS: dict[str, Callable[[Path], object]] = {
    "a folder of the user": lambda victim: str(victim),
    "a folder with another mark": lambda victim: (
        (victim / "elsewhere.json").write_text("/x 20261128-000000-000001"), str(victim)
    )[1],
    "a link to it": lambda victim: (victim.with_name("link").symlink_to(victim), f"{victim}/../link")[1],
    "a file": lambda victim: str(victim / "precious"),
    "a path that does not exist": lambda victim: str(victim / "none"),
    "no path": lambda victim: "",
    "a nul": lambda victim: "a\0b",
    "a number": lambda victim: 5,
    "nested": lambda victim: {"x": str(victim)},
}  # fmt: skip


@pytest.mark.parametrize("state", ["removing", "replacing"])
@pytest.mark.parametrize("names", NOT_OURS)
def test_what_another_program_names_is_neither_removed_nor_moved(
    tmp_path, monkeypatch, caplog, names, state
):
    (victim := tmp_path / "victim").mkdir()
    (victim / "precious").write_text("x")
    folder = tmp_path / "run"
    aside = folder / f"{state}-20261128-000000-000001"
    aside.mkdir(parents=True)
    named = NOT_OURS[names](victim)
    (aside / "elsewhere.json").write_text(json.dumps({str(tmp_path / "x"): named}))
    of_launch(monkeypatch, "first")
    start(make_config(folder))
    assert (victim / "precious").read_text() == "x"
    assert not (tmp_path / "x").exists()
    assert not earlier_runs(str(folder), "removing", "replacing")
    is_told = names not in ("a path that does not exist", "no path", "a nul")
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == is_told


@pytest.mark.parametrize("state", ["removing", "replacing"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null", b'{"/x": null}'])
def test_a_damaged_note_is_told_and_keeps_no_run_from_starting(
    tmp_path, monkeypatch, caplog, content, state
):
    folder = tmp_path / "run"
    aside = folder / f"{state}-20261128-000000-000001"
    aside.mkdir(parents=True)
    (aside / "elsewhere.json").write_bytes(content)
    of_launch(monkeypatch, "first")
    start(make_config(folder))
    (told,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert "elsewhere.json cannot be read" in told


def test_a_copied_run_folder_leaves_the_parts_of_the_first_alone(tmp_path, monkeypatch, caplog):
    """Its link to checkpoints, and its note of where replaced ones are, are copied as well."""
    folder, parts = fail_over_with_links(tmp_path / "place", monkeypatch)
    copy = tmp_path / "place/copy"
    shutil.copytree(folder, copy, symlinks=True)
    of_launch(monkeypatch, "second")
    start(make_config(copy))
    assert (parts / "step-4/.metadata").is_file()
    assert f"{parts} stays as it is: {copy}/" in caplog.text
    of_launch(monkeypatch, "third")
    start(make_config(folder))
    assert not parts.exists(), "the run whose they are removes them"


def fail_over_with_links(place: Path, monkeypatch) -> tuple[Path, Path]:
    """The folder of a run that has replaced another, and where the linked checkpoints of that are."""
    place.mkdir()
    write_old(place / "run", "elsewhere")
    of_launch(monkeypatch, "first")
    failed = RunFolder(make_config(place / "run"))
    failed.begin()
    failed.close(failed=True)
    (parts,) = (place / "elsewhere").glob("replaced-*")
    return place / "run", parts


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("num_done", range(9))
def test_a_killed_removal_of_linked_checkpoints_is_gone_on_with(tmp_path, monkeypatch, num_done):
    folder, parts = fail_over_with_links(tmp_path / "place", monkeypatch)
    calls = itertools.count()

    def until_killed(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*args, **kwargs) -> None:
            if threading.current_thread().name == "run-removal" and next(calls) >= num_done:
                raise SystemExit
            change(*args, **kwargs)

        return changed

    with monkeypatch.context() as patched:
        for name in ("unlink", "rmdir"):
            patched.setattr(os, name, until_killed(getattr(os, name)))
        of_launch(patched, "second")
        start(make_config(folder))
    assert next(calls) > num_done and earlier_runs(str(folder), "removing")
    of_launch(monkeypatch, "third")
    start(make_config(folder))
    assert not earlier_runs(str(folder), "removing")
    assert not list(parts.rglob("*")), "nobody removes them any more"


def test_a_removal_that_fails_is_tried_again_by_the_next_run(tmp_path, monkeypatch):
    folder, parts = fail_over_with_links(tmp_path / "place", monkeypatch)
    rmtree = shutil.rmtree

    def fails_for_parts(path, *args, **kwargs) -> None:
        if parts.name not in str(path) or "elsewhere" not in str(path):
            rmtree(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fails_for_parts)
        of_launch(patched, "second")
        start(make_config(folder))
    assert earlier_runs(str(folder), "removing") and list(parts.rglob(".metadata"))
    of_launch(monkeypatch, "third")
    start(make_config(folder))
    assert not parts.exists() and not earlier_runs(str(folder), "removing")


@pytest.mark.parametrize(("count", "note"), [(1, '{"launch": "old"}'), (0, "{")])
def test_what_may_be_of_an_earlier_attempt_is_kept(tmp_path, monkeypatch, capsys, count, note):
    folder = tmp_path / "run"
    write_old(folder, "in place")
    (folder / "starts/launch.json").write_text(note)
    of_launch(monkeypatch, "first", count)
    start(make_config(folder))
    (kept,) = earlier_runs(str(folder))
    assert kept.name.startswith("kept-") and (kept / "checkpoint/step-4/.metadata").is_file()
    assert "It stays there" in capsys.readouterr().out


def test_a_start_that_cannot_read_which_launch_the_run_is_of_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    write_old(folder, "in place")
    (folder / "starts/launch.json").unlink()
    (folder / "starts/launch.json").mkdir()  # as good as an error of the disk
    of_launch(monkeypatch, "first")
    for _ in range(2):
        with pytest.raises(FolderError, match=r"must be complete and readable .*launch\.json"):
            RunFolder(make_config(folder))
    assert (folder / "checkpoint/step-4/.metadata").is_file()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_replaced_run_that_goes_on_is_not_removed(tmp_path, monkeypatch, has_ended):
    folder = tmp_path / "run"
    aside = fail_over(folder, monkeypatch)
    of_launch(monkeypatch, "other")
    other = RunFolder(make_config(aside, overwrite=False))
    if has_ended:
        other.begin()
        other.close(failed=False)
    of_launch(monkeypatch, "second")
    start(make_config(folder))
    assert (aside / "checkpoint/step-4/.metadata").is_file()
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
