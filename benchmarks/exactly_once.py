# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that no prompt is lost or trained twice when processes are killed.

    python benchmarks/exactly_once.py [--json] [--kills 15 | --all] [--seed 0] [--keep FOLDER]
        [--no-comparison]

A real run has one training rank, two embedded servers, the shipped tiny model, a checkpoint after
every second step, and a learning rate of 0, so that the distribution of lengths stays the same.
At random moments the benchmark kills (SIGKILL) the rollout process, a server, or the whole
trainer, which it then starts again so that it resumes. At the end `ledger.jsonl` and the record
of the trained rollouts must agree: each prompt up to the position is trained, closed or open, and
no step is missing or present twice. A second run makes as many steps without kills. The lengths of
the trained completions of both runs must not differ by the Kolmogorov-Smirnov test at the 1 %
level; a run that preferred short answers after resuming would fail this test. ``--no-comparison``
leaves out the second run.

By default the benchmark kills 15 times, which takes about eight minutes on two cores; ``--all``
kills 50 times. The exit status is 1 if a condition does not hold. With ``--json`` the last line is
a JSON object.
"""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from figures import finish, make_parser
from ranks import fork_server

from torchtitan.grpo.data.record import BatchRecord, RecordReader

REPOSITORY = Path(__file__).resolve().parents[1]
MARK = "TORCHTITAN_GRPO_BENCHMARK_MARK"
VICTIMS = ("rollout process", "server", "trainer")
WORDS = {"rollout process": "grpo.rollout.process", "server": "grpo.inference.embedded"}
PROGRESS_SECONDS = 300.0
FINISH_SECONDS = 3600.0
END_SECONDS = 60.0
LONGEST_WAIT_SECONDS = 4.0
# Probability that a kill does not wait until the run has taken a step since the kill before.
HASTE = 0.2
# Asymptotic quantile of Kolmogorov's distribution for the two-sided test at the 1 % level.
CRITICAL = 1.63


class KilledRun:
    """A run whose processes are killed, and which is started again when the trainer is killed.

    Args:
        folder: The run's dump folder.
        seed: ``debug.seed``.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self._seed = folder, seed
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    num_ranks = 1
    agent_options: tuple[str, ...] = ()

    def settings(self, steps: int) -> dict[str, Any]:
        """Returns the settings of the run by their TOML keys."""
        return {
            "job.config_file": REPOSITORY / "train_configs/quickstart.toml",
            "job.dump_folder": self.folder,
            "training.steps": steps,
            "optimizer.lr": 0.0,
            "debug.seed": self._seed,
            "grpo.prompts_per_step": 4,
            "grpo.group_size": 4,
            "rollout.max_head_offpolicyness": 2,
            "rollout.max_new_tokens": 24,
            "rollout.temperature": 1.5,
            "rollout.record": self.folder / "rollouts.jsonl",
            "rollout.max_process_restarts": 1000,
            "inference.num_servers": 2,
            # The servers are forked, which saves them their imports.
            "inference.python": fork_server().launcher(),
            "inference.max_restarts": 1000,
            "inference.restart_seconds": 0.1,
            "inference.max_restart_seconds": 1,
            "evaluation.num_prompts": 1,
            "checkpoint.interval": 2,
            "checkpoint.keep_latest_k": 2,
            "observe.progress": "none",
        }

    def start(self, steps: int) -> None:
        """Starts the run, or resumes it from its newest checkpoint."""
        settings = self.settings(steps).items()
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", *self.agent_options),
            *("--nproc_per_node", str(self.num_ranks), "-m", "torchtitan.grpo_train"),
            *(
                "--checkpoint.enable",
                *(t for key, value in settings for t in (f"--{key}", str(value))),
            ),
        ]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: self._mark}
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.console.open("ab") as console:
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, env=os.environ | environment,
                stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.num_starts += 1

    @property
    def console(self) -> Path:
        """File that receives the output of the run."""
        return self.folder / "console.log"

    @property
    def steps(self) -> int:
        """Number of the newest step that has been logged."""
        lines = read_lines(self.folder / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    def has_checkpoint(self) -> bool:
        """Returns whether there is a complete checkpoint."""
        return any((self.folder / "checkpoint").glob("step-*/.metadata"))

    def wait_for(
        self, holds: Callable[[], bool], what: str, seconds: float = PROGRESS_SECONDS
    ) -> None:
        """Waits until ``holds`` returns True, for at most ``seconds``.

        Raises:
            SystemExit: If the condition does not hold in time, or if the run ends first.
        """
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while not holds():
            if self._process.poll() is not None or time.monotonic() > deadline:
                console = self.console.read_text(errors="replace")
                raise SystemExit(f"The run did not {what}:\n{console[-6000:]}")
            time.sleep(0.02)

    def kill(self, victim: str, rng: random.Random) -> str:
        """Kills one process of a kind, or the whole trainer if there is none for a minute.

        Returns:
            The kind of the victim.
        """
        found: list[psutil.Process] = []
        deadline = time.monotonic() + END_SECONDS  # it may be starting again
        while victim in WORDS and not found and time.monotonic() < deadline:
            found = [p for p in self.processes() if WORDS[victim] in command_of(p)]
            time.sleep(0.1)
        if not found:
            self.kill_all()
            return "trainer"
        with contextlib.suppress(psutil.Error):
            rng.choice(sorted(found, key=lambda p: p.pid)).kill()
        return victim

    def kill_all(self) -> None:
        """Kills the trainer, and then every process that has not ended with it."""
        for process in sorted(self.processes(), key=lambda p: "grpo_train" not in command_of(p)):
            with contextlib.suppress(psutil.Error):
                process.kill()
        deadline = time.monotonic() + END_SECONDS
        while self.processes():
            if time.monotonic() > deadline:
                raise SystemExit(f"Processes of the run are left after {END_SECONDS:g} s.")
            time.sleep(0.02)
        if self._process is not None:
            self._process.wait(END_SECONDS)

    def stop(self) -> None:
        """Ends the run as Ctrl-C does."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGINT)
        self._process.wait(END_SECONDS)
        self.kill_all()

    def finish(self) -> None:
        """Waits until the run ends."""
        assert self._process is not None
        if self._process.wait(FINISH_SECONDS) != 0:
            console = self.console.read_text(errors="replace")
            raise SystemExit(f"The run failed:\n{console[-6000:]}")
        self.kill_all()

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_alive and process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found


def command_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a JSONL file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def read_record(folder: Path) -> list[BatchRecord]:
    reader = RecordReader(str(folder / "rollouts.jsonl"), None, None, "rollout.record")
    return [batch for _, batch in reader]


def kill_often(run: KilledRun, num_kills: int, rng: random.Random) -> Counter[str]:
    """Starts a run and kills its processes; returns the number of kills of each kind.

    The run is alive afterwards.
    """
    killed: Counter[str] = Counter()
    run.start(steps=1_000_000)
    # A run that is killed before its first checkpoint has nothing to resume from.
    run.wait_for(run.has_checkpoint, "save its first checkpoint")
    while killed.total() < num_kills:
        if rng.random() > HASTE:
            before = run.steps
            run.wait_for(lambda: run.steps > before, "go on")  # noqa: B023
        time.sleep(rng.uniform(0.0, LONGEST_WAIT_SECONDS))
        victim = run.kill(rng.choice(VICTIMS), rng)
        killed[victim] += 1
        print(f"  kill {killed.total():2}: {victim} after step {run.steps}", flush=True)
        if victim == "trainer":
            run.kill_all()
            run.start(steps=1_000_000)
    goal = run.steps + 5
    run.wait_for(lambda: run.steps >= goal, "go on after the last kill")
    return killed


def check_ledger(folder: Path) -> dict[str, float]:
    """Compares the ledger with the record; ``violations`` counts the contradictions."""
    ledger, record = read_lines(folder / "ledger.jsonl"), read_record(folder)
    trained = [index for line in ledger for index in line["trained"]]
    closed = [int(index) for line in ledger for index in line["closed"]]
    last = ledger[-1]
    seen = Counter([*trained, *closed, *last["open"]])
    issued = set(range(last["position"]))
    in_record = [[group.group_id for group in batch.groups] for batch in record]
    violations = {
        "twice": sum(count - 1 for count in seen.values()),
        "lost": len(issued - seen.keys()),
        "unknown": len(seen.keys() - issued),
        "steps": int([line["step"] for line in ledger] != list(range(1, len(ledger) + 1))),
        "record": int([line["trained"] for line in ledger] != in_record[: len(ledger)]),
    }
    for name, count in violations.items():
        if count:
            print(f"  VIOLATION {name}: {count}")
    return {
        "steps": len(ledger),
        "issued": len(issued),
        "trained": len(trained),
        "closed": len(closed),
        "open": len(last["open"]),
        "violations": sum(violations.values()),
    }


def lengths_of(folder: Path, steps: int) -> np.ndarray:
    """Returns the lengths in tokens of the completions that the first ``steps`` steps trained on.

    The shape is [completions].
    """
    batches = read_record(folder)[:steps]
    return np.array(
        [
            len(rollout.token_ids)
            for batch in batches
            for group in batch.groups
            for rollout in group.rollouts
        ]
    )


def ks_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference of two empirical distribution functions (Smirnov 1939)."""
    points = np.union1d(a, b)
    of_a = np.searchsorted(np.sort(a), points, side="right") / len(a)
    of_b = np.searchsorted(np.sort(b), points, side="right") / len(b)
    return float(np.abs(of_a - of_b).max())


def measure(
    folder: Path, num_kills: int, seed: int, compares: bool
) -> tuple[dict[str, float], bool]:
    """Kills processes of a run and, if ``compares``, compares it with a run without kills.

    Returns:
        The figures, and whether all conditions hold.
    """
    run = KilledRun(folder / "killed", seed)
    try:
        killed = kill_often(run, num_kills, random.Random(seed))
        run.stop()
    finally:
        run.kill_all()
    figures = check_ledger(run.folder)
    figures |= {f"kills/{victim}": killed[victim] for victim in VICTIMS}
    figures["starts"] = run.num_starts
    print(
        f"{killed.total()} kills ({', '.join(f'{n} x {v}' for v, n in sorted(killed.items()))}), "
        f"{figures['steps']:.0f} steps: {figures['issued']:.0f} prompts issued, "
        f"{figures['trained']:.0f} trained, {figures['closed']:.0f} closed, {figures['open']:.0f} open, "
        f"{figures['violations']:.0f} violations (must be 0).",
        flush=True,
    )
    holds = figures["violations"] == 0
    if compares:
        compared, is_alike = compare(run, folder / "unkilled", seed, int(figures["steps"]))
        figures, holds = figures | compared, holds and is_alike
    return figures, holds


def compare(run: KilledRun, folder: Path, seed: int, steps: int) -> tuple[dict[str, float], bool]:
    """Compares a run with one that takes as many steps without kills.

    Returns:
        The figures, and whether the second run has no violations and the lengths do not differ.
    """
    unkilled = KilledRun(folder, seed)
    try:
        unkilled.start(steps)
        unkilled.finish()
    finally:
        unkilled.kill_all()
    violations = check_ledger(unkilled.folder)["violations"]
    a, b = (lengths_of(r.folder, steps) for r in (run, unkilled))
    distance = ks_distance(a, b)
    bound = CRITICAL * math.sqrt((len(a) + len(b)) / (len(a) * len(b)))
    figures = {
        "unkilled/violations": violations,
        "mean_length": float(a.mean()),
        "unkilled/mean_length": float(b.mean()),
        "ks_distance": distance,
        "ks_bound": bound,
    }
    print(
        f"The mean length is {a.mean():.2f} tokens with kills and {b.mean():.2f} without; the "
        f"Kolmogorov-Smirnov distance is {distance:.4f} (must be <= {bound:.4f})."
    )
    return figures, violations == 0 and distance <= bound


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--all", action="store_true", help="kill 50 times")
    parser.add_argument("--kills", type=int, help="number of kills; default: 15")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    parser.add_argument(
        "--no-comparison",
        dest="compares",
        action="store_false",
        help="leave out the run without kills",
    )
    options = parser.parse_args()
    # SIGTERM acts as Ctrl-C does: everything that was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.kills = options.kills or (50 if options.all else 15)
    with tempfile.TemporaryDirectory(prefix="exactly-once-") as temporary:
        folder = options.keep or Path(temporary)
        figures, holds = measure(folder, options.kills, options.seed, options.compares)
    return finish(options, "exactly_once", holds, figures)


if __name__ == "__main__":
    sys.exit(main())
