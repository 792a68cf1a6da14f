"""Whole runs: how they are started, and how what they leave behind is found."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "TORCHTITAN_GRPO_TEST_MARK"


@dataclass(eq=False)
class Run:
    """A training run under torchrun, and everything that descends from it."""

    folder: Path
    config: str | Path = "quickstart"
    num_ranks: int = 2
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts ``train_configs/<config>.toml``, or the file where ``config`` is a path."""
        config = self.config
        if not isinstance(config, Path):
            config = REPOSITORY / "train_configs" / f"{config}.toml"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(self.num_ranks), "-m", "torchtitan.grpo_train"),
            *("--job.config_file", str(config)),
            *("--job.dump_folder", str(self.folder), *self.arguments),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: self.mark}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "console.log").open("wb") as console:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment | self.environment,
                stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def finish(self, timeout_seconds: float = 240) -> int:
        """Waits for the end; returns the exit status."""
        assert self.process is not None
        return self.process.wait(timeout_seconds)

    def succeed(self) -> "Run":
        """Runs to the end, which must be a good one."""
        self.start()
        assert self.finish() == 0, self.console[-6000:]
        return self

    def fail(self, timeout_seconds: float = 120) -> str:
        """Runs to the end, which must be a bad one; returns the one message for the user."""
        if self.process is None:
            self.start()
        assert self.finish(timeout_seconds) != 0, self.console[-6000:]
        messages = self.errors()
        assert len(messages) == 1, self.console[-6000:]
        assert not self.has_traceback(), self.console[-6000:]
        self.wait_for_nobody()
        return messages[0]

    def errors(self) -> list[str]:
        """The messages for the user, each up to torchrun's own report of the failure."""
        parts = re.split(r"^error: ", self.console, flags=re.MULTILINE)[1:]
        return [re.split(r"^[EW]\d{4} ", part, maxsplit=1, flags=re.MULTILINE)[0] for part in parts]

    def has_traceback(self) -> bool:
        """Whether a traceback of ours was printed; torchrun prints one of its own."""
        frames = [line for line in self.console.splitlines() if line.startswith('  File "')]
        return any("torchtitan" in frame for frame in frames)

    @property
    def console(self) -> str:
        return (self.folder / "console.log").read_text(errors="replace")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def wait_for(self, holds: Callable[[], bool], timeout_seconds: float = 120) -> None:
        """Returns when ``holds`` does; fails where the run ends before."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_seconds
        while not holds():
            assert self.process.poll() is None, self.console[-6000:]
            assert time.monotonic() < deadline, self.console[-6000:]
            time.sleep(0.02)

    def wait_for_step(self, step: int, timeout_seconds: float = 120) -> None:
        """Returns when the run has logged ``step``."""
        self.wait_for(lambda: len(self.metrics) >= step, timeout_seconds)

    def processes(self, *words: str) -> list[psutil.Process]:
        """Living processes of this run that have all ``words`` in their command line."""
        return [p for p in self.left_behind() if _has_words(p, words)]

    def left_behind(self) -> list[psutil.Process]:
        """Living processes that descend from this run, found by a mark in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def wait_for_nobody(self, timeout_seconds: float = 10) -> None:
        """Fails where a process is left after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while left := self.left_behind():
            assert time.monotonic() < deadline, [p.cmdline() for p in left]
            time.sleep(0.1)

    def kill(self) -> None:
        for process in self.left_behind():
            with contextlib.suppress(psutil.Error):
                process.kill()


def _has_words(process: psutil.Process, words: tuple[str, ...]) -> bool:
    with contextlib.suppress(psutil.Error):
        return all(word in " ".join(process.cmdline()) for word in words)
    return False


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs; what they leave behind is killed at the test's end."""
    runs: list[Run] = []

    def make(*arguments: str, name: str = "run", **kwargs: Any) -> Run:
        run = Run(folder=tmp_path / name, arguments=list(arguments), **kwargs)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.kill()
