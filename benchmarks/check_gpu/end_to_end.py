# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A short real run with two embedded servers, one of which stands still and is then killed.

The servers share the GPU with training. While one stands still, the other one goes on, so the run
does too. A step's own time is its duration without the wait for rollouts, of which there are fewer.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from check_gpu.row import Row, Settings, judged
from torchtitan.grpo.system.child import start_child, stop_children

_MARK = "TORCHTITAN_GRPO_CHECK_MARK"
_REPOSITORY = Path(__file__).resolve().parents[2]
_CONFIG = _REPOSITORY / "train_configs" / "quickstart.toml"
_PROGRAM = "import torchtitan_grpo; torchtitan_grpo.main()"
_SERVER_MODULE = "torchtitan.grpo.inference.embedded"
_STOPPED_SECONDS = 10.0
_PATIENCE_SECONDS = 150.0
_END_SECONDS = 60.0
_STOPPED_STATUS = 128 + signal.SIGTERM
"""Exit status of a run that was asked to stop, and ended in order."""
_SETTLED_STEP, _STEPS_AFTER = 20, 10
_PART, _SECONDS = 1.1, 0.02
_ARGUMENTS = (
    "--training.steps=100000", "--grpo.prompts_per_step=4", "--evaluation.num_prompts=8",
    "--inference.num_servers=2", "--inference.control_timeout_seconds=3",
    "--weight_sync.timeout_seconds=5", "--lr_scheduler.decay_ratio=0.0", "--optimizer.lr=1e-5",
)  # fmt: skip


class ShortRun:
    """A run of the real command, in a folder of its own."""

    def __init__(self, settings: Settings) -> None:
        folder = settings.folder
        (folder / "assets").symlink_to(_REPOSITORY / "assets")
        self._metrics, self._log = folder / "run" / "metrics.jsonl", folder / "run.log"
        self._mark = uuid.uuid4().hex
        environment = os.environ | {_MARK: self._mark, "HF_HUB_OFFLINE": "1"}
        count = "--gpus=1" if settings.on_gpu else "--nproc=1"
        if not settings.on_gpu:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _PROGRAM, "train", str(_CONFIG), count, *_ARGUMENTS]
        self.process = start_child(
            [*command, "--job.dump_folder=run"],
            env=environment, log_file=self._log, cwd=str(folder),
        )  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """Returns the lines of the metrics file that are whole."""
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, what: str, holds: Callable[[], bool]) -> None:
        """Waits until something holds.

        Raises:
            RuntimeError: If the run ended before that, or it took too long.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{what} must happen within {_PATIENCE_SECONDS:g} s while the run goes on; its "
                    f"exit status is {self.process.poll()}. The end of its output:\n{self.tail()}"
                )
            time.sleep(0.2)

    def wait_for_steps(self, count: int) -> None:
        """Waits until as many steps have ended, in all."""
        self.wait_for(f"Step {count}", lambda: len(self.records()) >= count)

    def tail(self) -> str:
        """Returns the end of the run's output."""
        return self._log.read_text(errors="replace")[-3000:]

    def servers(self) -> list[int]:
        """Returns the processes of the run's servers, by the mark in their environment."""
        return [int(p.name) for p in Path("/proc").glob("[0-9]*") if self._is_server(p)]

    def _is_server(self, process: Path) -> bool:
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            mark = f"{_MARK}={self._mark}".encode()
            return _SERVER_MODULE.encode() in words and mark in (
                process / "environ"
            ).read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            return False

    def stop(self) -> int | None:
        """Asks the run to end; returns its exit status, ``None`` if it does not end."""
        os.kill(self.process.pid, signal.SIGTERM)
        try:
            return self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Ends what is left of the run."""
        stop_children([self.process])


def run(settings: Settings) -> Iterator[Row]:
    """Yields a row for the server that stands still, and one for the end of the run."""
    if not _CONFIG.exists():
        reason = (
            f"It needs {_CONFIG}: install a checkout of the repository with `pip install -e .`."
        )
        yield Row("a short run", "skipped", reason=reason)
        return
    short = ShortRun(settings)
    try:
        short.wait_for_steps(_SETTLED_STEP + 3 * _STEPS_AFTER)
        yield _stand_still(short, settings)
        yield _kill(short)
    finally:
        short.close()


def _stand_still(short: ShortRun, settings: Settings) -> Row:
    short.wait_for("Two servers", lambda: len(short.servers()) == 2)
    server, before = short.servers()[0], short.records()[_SETTLED_STEP:]
    os.kill(server, signal.SIGSTOP)
    try:
        time.sleep(_STOPPED_SECONDS)
        during = short.records()[_SETTLED_STEP + len(before) :]
    finally:
        os.kill(server, signal.SIGCONT)
    if not during:
        raise RuntimeError(
            f"Steps must go on while one of two servers stands still for {_STOPPED_SECONDS:g} s, "
            "and none ended."
        )
    quiet, slow = _own_seconds(before), _own_seconds(during)
    figures = {
        "steps": float(len(during)), "quiet_step_seconds": quiet, "step_seconds": slow,
        "boundary_stall_ms": 1e3 * max(r["time/boundary_stall_seconds"] for r in during),
    }  # fmt: skip
    case = f"a server stands still for {_STOPPED_SECONDS:g} s"
    if not settings.on_gpu:  # a server that stands still leaves its cores to the others
        return Row(case, "measured", figures)
    holds = slow <= max(quiet * _PART, quiet + _SECONDS)
    return judged(case, holds, "the median step grows by at most 10 % or 20 ms", figures)


def _own_seconds(records: list[dict[str, Any]]) -> float:
    """Returns the median duration of steps without the wait for rollouts."""
    return statistics.median(
        record["time/step_seconds"] - record["time/wait_data_seconds"] for record in records
    )


def _kill(short: ShortRun) -> Row:
    os.kill(short.servers()[0], signal.SIGKILL)
    killed_at = len(short.records())
    short.wait_for_steps(killed_at + _STEPS_AFTER)
    status = short.stop()
    figures = {"steps": float(len(short.records())), "steps_before_kill": float(killed_at)}
    if status is not None:
        figures["exit_status"] = float(status)
    case = "a server is killed, and the run is stopped"
    is_ended = status == _STOPPED_STATUS
    row = judged(case, is_ended, f"more steps, and exit status {_STOPPED_STATUS}", figures)
    if not is_ended:
        return Row(row.case, row.status, figures, row.bound, f"{row.reason}\n{short.tail()}")
    return row
