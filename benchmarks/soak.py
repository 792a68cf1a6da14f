# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Injects faults into a run for hours, and checks that its processes do not grow.

    python benchmarks/soak.py [--json] [--seconds 7200] [--kind vllm] [--seed 0] [--keep FOLDER]

A real run under torchrun with ``--max-restarts`` has two training ranks, the shipped tiny model and
two launched servers of the given kind. At random moments a server is killed, or stopped for some
seconds. In the first quarter of the time a training rank is killed twice, and the disk of the run's
folder, which is a small file system of its own, is full for a while. If the user may not mount a
file system, the benchmark prints this and leaves the full disk out. After the first quarter only
the second server is harmed, so the processes that are measured in the second half have been at work
for a quarter before it: memory that a process takes once, while it warms up, does not count as
growth. The second half begins when both servers serve and ``SETTLE_SECONDS`` have passed.

The memory of every process that lives through the whole second half must be constant: the medians
of its unshared pages in the first and in the last quarter of the half differ by at most 2 %. Its
numbers of file descriptors and threads must return to the same values. ``samples.jsonl`` in the
kept folder has all measurements, with the number of servers that were lost. At the end the ledger
must account for each prompt exactly once, and the run must have continued after every fault.

The exit status is 1 if a condition does not hold. With ``--json`` the last line is a JSON object.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from exactly_once import REPOSITORY, KilledRun, check_ledger, command_of
from figures import finish, make_parser

DISK_MIB = 256
FULL_SECONDS = 20.0
SAMPLE_SECONDS = 5.0
START_SECONDS = 900.0
# Time between two faults of servers, in which a server can join again.
FAULT_SECONDS = (20.0, 60.0)
STOP_SECONDS = (4.0, 20.0)
# Time without faults of servers before the second half.
SETTLE_SECONDS = 120.0
# Times at which a rank is killed and the disk is filled, as parts of the whole time.
RANK_KILLS, DISK_FILL = (0.08, 0.22), 0.15
# Part of the whole time in which the first server is harmed, too.
FIRST_SERVER_HARMED = 0.25
LARGEST_GROWTH = 0.02
LONGEST_RECORD = 1 << 16  # maximum number of bytes of a record in metrics.jsonl


class SoakedRun(KilledRun):
    """A run of two ranks and two servers. Torchrun starts the ranks again when one of them fails.

    ``record``, with the trained rollouts, lies outside of the folder whose disk is filled.
    """

    def __init__(self, folder: Path, kind: str, seed: int, record: Path) -> None:
        super().__init__(folder, seed)
        self._kind, self._record = kind, record

    num_ranks = 2
    agent_options = ("--max-restarts=50",)

    def settings(self, steps: int) -> dict[str, Any]:
        python = sys.executable
        if self._kind != "embedded":
            default = REPOSITORY / f".venv-{self._kind}/bin/python"
            variable = f"TORCHTITAN_GRPO_{self._kind.upper()}_PYTHON"
            python = os.environ.get(variable, str(default))
        return super().settings(steps) | {
            "rollout.request_timeout_seconds": 30,
            "rollout.record": self._record,
            "inference.kind": self._kind,
            "inference.python": python,
            "inference.max_restarts": 10000,
            "inference.restart_seconds": 0.5,
            "inference.max_restart_seconds": 5,
            "inference.control_timeout_seconds": 10,
            "weight_sync.timeout_seconds": 15,
            "checkpoint.interval": 10,
            # The flight recorder takes 1.2 KiB for each collective until its ring buffer is full.
            "comm.trace_buf_size": 1000,
        }

    @property
    def console(self) -> Path:
        return self._record.with_name("console.log")

    @property
    def samples(self) -> Path:
        return self._record.with_name("samples.jsonl")

    @property
    def num_lost_servers(self) -> int | None:
        """Number of servers that were lost at the newest step; None before the first step."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - LONGEST_RECORD, 0))
                whole = file.read().rpartition(b"\n")[0]  # the last line may still be incomplete
        except OSError:
            return None
        newest = whole.rpartition(b"\n")[2]
        return int(json.loads(newest)["weight_sync/lost_servers"]) if newest else None

    @property
    def has_ended(self) -> bool:
        """Whether torchrun has ended."""
        return self._process is None or self._process.poll() is not None

    def http_ports(self) -> list[int]:
        """Returns the ports of the launched servers."""
        try:
            (entry,) = json.loads((self.folder / "monitoring/servers.json").read_text())
        except (OSError, ValueError):
            return []
        return sorted(int(target.rpartition(":")[2]) for target in entry["targets"])

    def servers(self) -> list[psutil.Process]:
        """Returns the main processes of the launched servers, in the order of their ports."""
        owner = {
            c.laddr[1]: c.pid
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.pid is not None and c.laddr
        }
        return [psutil.Process(owner[port]) for port in self.http_ports() if port in owner]

    def ranks(self) -> list[psutil.Process]:
        return [
            p
            for p in self.processes()
            if "grpo_train" in command_of(p) and "torch.distributed.run" not in command_of(p)
        ]


def name_of(process: psutil.Process) -> str:
    command = command_of(process)
    for words, name in (
        ("torch.distributed.run", "agent"),
        ("grpo_train", "rank"),
        ("grpo.rollout.process", "rollout process"),
        ("scoring_worker", "reward worker"),
    ):
        if words in command:
            return name
    return f"server ({process.name()})"


def descriptors(process: psutil.Process, http_ports: set[int]) -> tuple[int, int]:
    """Returns the number of a process's file descriptors, and that of its connections of requests.

    The latter are the established connections with one of the ports. They are not among the former.
    """
    # Listed before the descriptors, so that one that is closed meanwhile is missing from both.
    requests = {
        str(c.fd)
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_ESTABLISHED and http_ports & {c.laddr[1], c.raddr[1]}
    }
    found = set(os.listdir(f"/proc/{process.pid}/fd"))
    return len(found - requests), len(found & requests)


@dataclass
class Life:
    """Measurements of one process: time, unshared MiB, file descriptors, and threads."""

    name: str
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)

    def quarters(self, column: int) -> tuple[list[float], list[float]]:
        """Returns the values of a column in the first and in the last quarter."""
        size = max(len(self.samples) // 4, 1)
        values = [float(sample[column]) for sample in self.samples]
        return values[:size], values[-size:]

    def curve(self) -> str:
        """Returns the median memory of each eighth in MiB. With a leak, it rises until the end."""
        size = max(len(self.samples) // 8, 1)
        parts = [self.samples[i : i + size] for i in range(0, len(self.samples), size)]
        return " ".join(f"{statistics.median(s[1] for s in part):.0f}" for part in parts[:8])

    @property
    def growth(self) -> float:
        first, last = map(statistics.median, self.quarters(1))
        return last / first - 1

    def rise(self, column: int) -> float:
        """Returns the change of a column's minimum from the first to the last quarter."""
        first, last = map(min, self.quarters(column))
        return last - first


class Soak:
    """Injects faults into a run and measures its processes, in two halves of half the seconds each.

    ``disk`` is the run's file system. Without it, the disk is not filled.
    """

    def __init__(self, run: SoakedRun, seconds: float, rng: random.Random, disk: Path | None):
        self._run, self._seconds, self._rng, self._disk = run, seconds, rng, disk
        self.faults: Counter[str] = Counter()
        self.lives: defaultdict[tuple[int, float], Life] = defaultdict(lambda: Life(""))
        self.measured_from: float | None = None
        self._due: list[tuple[float, Callable[[], None]]] = []

    def go(self) -> None:
        """Runs the first half, waits until all servers serve, and runs the second half."""
        self._begin = time.monotonic()
        half = self._seconds / 2
        for part in RANK_KILLS:
            self._at(part * self._seconds, self._kill_rank)
        if self._disk is not None:
            self._at(DISK_FILL * self._seconds, self._fill_disk)
        self._at(self._rng.uniform(*FAULT_SECONDS), self._harm_server)
        # The next fault of a server is always due: the first half ends when nothing else is.
        while self._now < half or any(what != self._harm_server for _, what in self._due):
            self._pass()
        self._settle()
        self.measured_from = self._now
        self._at(self._now + self._rng.uniform(*FAULT_SECONDS), self._harm_server)
        next_sample = 0.0
        while self._now < self.measured_from + half:
            self._pass()
            if self._now >= next_sample:
                self._sample(self._now)
                next_sample = self._now + SAMPLE_SECONDS

    def _pass(self) -> None:
        """Injects the faults that are due, and starts the run again if it has ended."""
        for due in [entry for entry in self._due if entry[0] <= self._now]:
            self._due.remove(due)
            due[1]()
        if self._run.has_ended:
            self._say("the run has ended and is started again")
            self.faults["starts by hand"] += 1
            self._run.kill_all()
            self._run.start(10_000_000)
        time.sleep(0.2)

    def _settle(self) -> None:
        """Waits until both servers have served for a while without a fault."""
        self._due.clear()
        self._run.wait_for(
            lambda: len(self._run.servers()) == 2 and self._run.num_lost_servers == 0,
            "serve with both servers", START_SECONDS,
        )  # fmt: skip
        until = self._now + min(SETTLE_SECONDS, self._seconds / 20)
        while self._now < until:
            self._pass()
        self._say("the second half begins")

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _at(self, when: float, what: Callable[[], None]) -> None:
        self._due.append((when, what))

    def _say(self, what: str) -> None:
        print(f"  {self._now:6.0f} s, step {self._run.steps}: {what}", flush=True)

    def _harm_server(self) -> None:
        servers = self._run.servers()
        is_first_spared = self._now > FIRST_SERVER_HARMED * self._seconds
        harmed = servers if not is_first_spared else servers[1:]
        if harmed:
            victim = self._rng.choice(harmed)
            if self._rng.random() < 0.5:
                self._signal(victim, signal.SIGKILL)
                self.faults["servers killed"] += 1
                self._say(f"server {victim.pid} is killed")
            else:
                seconds = self._rng.uniform(*STOP_SECONDS)
                self._signal(victim, signal.SIGSTOP)
                self._at(self._now + seconds, lambda: self._signal(victim, signal.SIGCONT))
                self.faults["servers stopped"] += 1
                self._say(f"server {victim.pid} is stopped for {seconds:.0f} s")
        self._at(self._now + self._rng.uniform(*FAULT_SECONDS), self._harm_server)

    def _signal(self, process: psutil.Process, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.is_running():
                os.killpg(os.getpgid(process.pid), signum)

    def _kill_rank(self) -> None:
        ranks = self._run.ranks()
        if not self._run.has_checkpoint() or len(ranks) < 2:
            self._at(self._now + 2.0, self._kill_rank)
            return
        victim = self._rng.choice(sorted(ranks, key=lambda p: p.pid))
        with contextlib.suppress(psutil.Error):
            victim.kill()
        self.faults["ranks killed"] += 1
        self._say(f"rank {victim.pid} is killed")

    def _fill_disk(self) -> None:
        assert self._disk is not None
        filler = self._disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        self.faults["disks filled"] += 1
        self._say(f"the disk is full for {FULL_SECONDS:.0f} s")
        self._at(self._now + FULL_SECONDS, filler.unlink)

    def _sample(self, now: float) -> None:
        num_lost, http_ports = self._run.num_lost_servers, set(self._run.http_ports())
        with self._run.samples.open("a") as file:
            for process in self._run.processes():
                with contextlib.suppress(psutil.Error, FileNotFoundError):
                    memory = process.memory_full_info().uss / 2**20
                    num_files, num_requests = descriptors(process, http_ports)
                    num_threads = process.num_threads()
                    life = self.lives[process.pid, process.create_time()]
                    life.name = life.name or name_of(process)
                    life.samples.append((now, memory, num_files, num_threads))
                    row = [process.pid, life.name, *life.samples[-1], num_lost, num_requests]
                    file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mounts a file system of ``DISK_MIB`` at a folder; yields None if that is not allowed."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        print(
            "LEFT OUT: the disk is not filled, because no file system may be mounted here.",
            flush=True,
        )
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def judge(soak: Soak, seconds: float) -> tuple[dict[str, float], list[str]]:
    """Returns the figures of all long-lived processes, and a text for each condition that fails."""
    figures: dict[str, float] = {}
    problems = []
    # A long-lived process was there at the beginning and at the end of the second half.
    begin = soak.measured_from or 0.0
    lived = [
        life
        for life in soak.lives.values()
        if life.samples[0][0] <= begin + 0.05 * seconds
        and life.samples[-1][0] >= begin + seconds / 2 - 20
    ]
    for index, life in enumerate(sorted(lived, key=lambda life: life.name)):
        fds, threads = life.rise(2), life.rise(3)
        label = f"{index}/{life.name}"
        figures |= {
            f"{label}/mib": statistics.median(life.quarters(1)[1]),
            f"{label}/growth": life.growth,
            f"{label}/fds": fds,
            f"{label}/threads": threads,
        }
        print(
            f"  {life.name:28} {figures[f'{label}/mib']:8.1f} MiB, {100 * life.growth:+6.2f} %, "
            f"file descriptors {fds:+.0f}, threads {threads:+.0f} ({len(life.samples)} samples); MiB {life.curve()}"
        )
        if life.growth > LARGEST_GROWTH:
            problems.append(f"the memory of a {life.name} grew by {100 * life.growth:.1f} %")
        if fds > 0 or threads > 0:
            problems.append(
                f"the numbers of file descriptors and threads of a {life.name} changed by "
                f"{fds:+.0f} and {threads:+.0f}"
            )
    names = Counter(life.name for life in lived)
    if names["rank"] < 2 or names["rollout process"] < 1:
        problems.append(
            "two ranks and the rollout process must live through the second half, but only these "
            f"processes did: {dict(names)}"
        )
    return figures, problems


def measure(folder: Path, kind: str, seconds: float, seed: int) -> tuple[dict[str, float], bool]:
    with small_disk(folder / "run") as disk:
        run = SoakedRun(folder / "run", kind, seed, folder / "rollouts.jsonl")
        try:
            run.start(10_000_000)
            # A run that is harmed before its first checkpoint has nothing to resume from.
            run.wait_for(run.has_checkpoint, "save its first checkpoint", START_SECONDS)
            soak = Soak(run, seconds, random.Random(seed), disk)
            soak.go()
            last = run.steps
            run.wait_for(lambda: run.steps >= last + 3, "go on after the last fault", START_SECONDS)
            run.stop()
        finally:
            run.kill_all()
        (run.folder / "rollouts.jsonl").symlink_to(folder / "rollouts.jsonl")
        ledger = check_ledger(run.folder)
    figures, problems = judge(soak, seconds)
    if ledger["violations"]:
        problems.append(f"the ledger has {ledger['violations']:.0f} violations")
    figures |= {f"ledger/{name}": value for name, value in ledger.items()}
    figures |= {f"faults/{name}": float(count) for name, count in soak.faults.items()}
    print(
        f"{kind}, {seconds:.0f} s, {ledger['steps']:.0f} steps, faults {dict(soak.faults)}: "
        f"{ledger['issued']:.0f} prompts issued, {ledger['violations']:.0f} violations (must be 0).\n"
        + ("; ".join(problems) or "All conditions hold.")
    )
    return figures, not problems


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--kind", choices=("embedded", "vllm", "sglang"), default="vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, help="folder in which the run and its console are kept"
    )
    options = parser.parse_args()
    # SIGTERM acts as Ctrl-C does: everything that was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.keep or Path(temporary)
        figures, holds = measure(folder, options.kind, options.seconds, options.seed)
    return finish(options, "soak", holds, figures)


if __name__ == "__main__":
    sys.exit(main())
