# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how long a weight push stalls the training thread between two steps.

    python benchmarks/boundary_stall.py [--json] [--all] [--steps N] [--sizes 1M 30M 120M]
                                        [--conditions healthy slow stopped killed]
                                        [--modes async foreground] [--keep FOLDER]

Two training ranks (gloo, CPU; FSDP2, or a pipeline of two stages for the 120M model) run the
real trainer on prepared rollouts and push the weights of every step to three embedded servers,
either in the background (async) or in the foreground. Each rank is bound to a core of its own, if
there are enough, with the highest priority. The servers have a lower priority, because they
stand for servers on other machines. The condition of a run says what happens to the servers:

    healthy   nothing happens
    slow      one server runs for a tenth of the time (SIGSTOP for 90 ms, SIGCONT for 10 ms), so
              that everything it does, receiving weights included, takes about ten times as long
    stopped   one server gets SIGSTOP and never continues
    killed    one server gets SIGKILL

The stall of a step is all the time that the training thread spends on weight sync: reserving a
slot, the fence before the optimizer step, publishing after it, and, if the version is attested
(`weight_sync.attest_every`), the forward pass over the probe's tokens, whose median is the
column "attested". The rank with the longer stall counts. Two columns show how busy the machine
was: "no queue" is the 99th percentile of the stalls without the time for which the thread was
ready to run but had no core, and "floor" is the 99th percentile of the duration of 0.1 ms of
plain computing right before each version is published. On a virtual machine, "stolen" is the
part of the cores' time that the host gave to other machines. If that is too much for the bound
of the smallest model, the run is printed as discarded and repeated. The lag of a server is the
number of versions that it is behind when a version has been published. The lag of a healthy
server must never exceed 1 if the pushes of the healthy condition (99th percentile) take less
time than a step. Training computes in float32; weights are sent in the dtype of the table's last
column.

By default the smallest model is run in the background mode under all four conditions, which takes
about ten minutes. ``--all`` runs all sizes in both modes, which takes two and a half hours. The
benchmark prints one row for each run and then the bounds, and exits with status 1 if a bound is
exceeded. With ``--json`` the last line is a JSON object.
"""

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from boundary_outcome import (
    HEADER,
    NUM_SERVERS,
    SICK,
    WARM_UP,
    Outcome,
    figures_of,
    judge,
    read_outcome,
    row,
)
from disturbed_servers import Throttle, running_servers, signal_process
from figures import finish, make_parser
from random_models import make_model

from torchtitan.grpo.system.child import start_child, stop_children

REPOSITORY = Path(__file__).resolve().parents[1]
FAULT_AT = 20
"""Step after which a server is stopped or killed; a slow one is slow from the warm-up on."""
STEP_TIMEOUT_SECONDS = 300.0
FOREGROUND_STEPS = 200


@dataclass(frozen=True)
class Size:
    """A model and the size of its steps.

    Attributes:
        rows: Number of rows of each rank, all in one microbatch. There are so many that a push ends
            within a step.
        seq_len: Number of tokens of a row.
        wire: Dtype in which the weights are sent.
        steps: Number of counted steps in the background mode. With 200 steps, the 99th percentile
            would be the third longest stall, which two interruptions from outside, or one and the
            attested step, are enough to change. More steps make the percentile more robust.
        max_stolen: Maximum share of the cores' time that the host of a virtual machine may take, in
            percent. A bound of a few milliseconds says nothing about the trainer if the host takes
            more. A run in the background mode is then repeated, and both runs are printed. Nothing
            else leads to a repetition.
        pipeline: Whether each rank has half of the layers (1F1B) instead of half of every
            parameter.
    """

    name: str
    rows: int
    seq_len: int
    wire: str
    steps: int
    max_stolen: float = 100.0
    pipeline: bool = False


SIZES = {
    size.name: size
    for size in (
        Size("1M", rows=8, seq_len=128, wire="float32", steps=300, max_stolen=1.5),
        Size("30M", rows=1, seq_len=64, wire="float32", steps=300),
        # FSDP2 would spend 3 s a step on gathering parameters over loopback.
        Size("120M", rows=2, seq_len=32, wire="bfloat16", steps=250, pipeline=True),
    )
}
CONDITIONS = ("healthy", "slow", "stopped", "killed")
MODES = ("async", "foreground")


@dataclass(frozen=True)
class Condition:
    """One run of the trainer."""

    size: Size
    fault: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.size.name}/{self.fault}/{self.mode}"

    @property
    def steps(self) -> int:
        """Number of counted steps. It is smaller in the foreground mode, which has no bound."""
        return self.size.steps if self.mode == "async" else FOREGROUND_STEPS


# -- one condition --------------------------------------------------------------------


def run_undisturbed(
    condition: Condition, model: Path, steps: int, options: argparse.Namespace
) -> Outcome:
    """Returns the first run that the host did not disturb, or the last permitted run."""
    for _ in range(options.tries - 1):
        outcome = run_condition(condition, model, steps, options.keep)
        if condition.mode == "foreground" or outcome.stolen <= condition.size.max_stolen:
            return outcome
        why = f"discarded: stolen > {condition.size.max_stolen:g} %"
        print(f"{row(condition.name, condition.size.wire, outcome)}  {why}", flush=True)
    return run_condition(condition, model, steps, options.keep)


def run_condition(condition: Condition, model: Path, steps: int, keep: Path | None) -> Outcome:
    """Starts servers and ranks, causes the fault, and reads the records."""
    with tempfile.TemporaryDirectory(prefix="boundary-") as name, ExitStack() as stack:
        folder = Path(name)
        servers = stack.enter_context(running_servers(NUM_SERVERS, model, folder))
        throttle = Throttle(servers[SICK].process.pid)
        stack.callback(throttle.stop)
        # The ranks are started last and ended first, because a server that ends before them would
        # count as a failure.
        pipe = folder / "steps"
        os.mkfifo(pipe)
        before = cpu_ticks()
        ranks = start_ranks(condition, model, [s.url for s in servers], steps, folder, pipe)
        stack.callback(stop_children, [ranks])
        bring_about = {
            "healthy": (steps + WARM_UP + 1, lambda: None),
            "slow": (WARM_UP // 2, throttle.start),
            "stopped": (
                FAULT_AT,
                lambda: signal_process(servers[SICK].process.pid, signal.SIGSTOP),
            ),
            "killed": (FAULT_AT, lambda: signal_process(servers[SICK].process.pid, signal.SIGKILL)),
        }[condition.fault]
        watch_steps(pipe, ranks, folder / "ranks.log", *bring_about)
        if keep is not None:
            target = keep / condition.name.replace("/", "-")
            shutil.copytree(folder, target, dirs_exist_ok=True, ignore=only_results)
        stolen = 100 * stolen_share(before, cpu_ticks())
        results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return read_outcome(results, [s.url for s in servers], stolen)


def cpu_ticks() -> list[int]:
    """Returns the ticks of each kind of processor time that the kernel counts, over all cores."""
    return [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def stolen_share(before: list[int], after: list[int]) -> float:
    """Returns the share of the time between two readings that the host took away, in percent."""
    spent = np.subtract(after, before)
    return float(spent[-1] / max(spent.sum(), 1))


def only_results(_: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith((".json", ".log", ".jsonl"))]


def start_ranks(
    condition: Condition, model: Path, urls: list[str], steps: int, folder: Path, pipe: Path
) -> subprocess.Popen:
    size, is_sick = condition.size, condition.fault in ("stopped", "killed")
    settings = {
        "job.dump_folder": folder,
        "model.hf_assets_path": model,
        "training.steps": steps + WARM_UP,
        "training.seq_len": size.seq_len,
        "training.local_batch_size": size.rows,
        "training.mixed_precision_param": "float32",
        "optimizer.lr": 1e-6,
        "optimizer.implementation": "fused",
        "lr_scheduler.warmup_steps": 0,
        "optimizer.beta2": 0.95,
        "optimizer.weight_decay": 0.1,
        "lr_scheduler.decay_ratio": 1.0,
        "activation_checkpoint.mode": "none",
        "prompts.path": REPOSITORY / "assets/reverse_digits/train.jsonl",
        "reward.functions": "exact_match",
        "rollout.max_new_tokens": size.seq_len - 8,
        "grpo.prompts_per_step": size.rows,
        "grpo.group_size": 2,
        "inference.urls": ",".join(urls),
        # The trainer waits no longer than this for a stopped server. Giving it up takes a few
        # control requests, which together must take less than twice weight_sync.timeout_seconds.
        "inference.control_timeout_seconds": 5 if is_sick else 120,
        "weight_sync.timeout_seconds": 10 if is_sick else 120,
        "weight_sync.dtype": size.wire,
        "observe.progress": "none",
        "observe.log_level": "warning",
        "observe.samples_per_step": 0,
        "debug.seed": 0,
    }
    if size.pipeline:
        settings |= {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 2}
    args = ["--grpo.async_weight_update" if condition.mode == "async" else
            "--grpo.no-async-weight-update"]  # fmt: skip
    args += [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    job = folder / "job.json"
    job.write_text(json.dumps({"args": args, "steps_pipe": str(pipe)}))
    return start_child(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", str(Path(__file__).with_name("boundary_run.py")), str(job)),
        ],
        env=rank_environment(),
        log_file=folder / "ranks.log",
    )


def rank_environment() -> dict[str, str]:
    """Returns the environment of a rank, which computes with one thread on the CPU."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        # Freed memory is kept. Otherwise every step would cause page faults for its largest
        # tensors.
        "MALLOC_MMAP_THRESHOLD_": str(2**31),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    # Without bytecode files, every start would compile torch's sources again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def watch_steps(
    pipe: Path, ranks: subprocess.Popen, log: Path, fault_at: int, fault: Callable[[], object]
) -> None:
    """Follows the steps until the ranks end, and causes the fault after step ``fault_at``."""
    source = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        is_due, last_news = True, time.monotonic()
        while ranks.poll() is None:
            if time.monotonic() - last_news > STEP_TIMEOUT_SECONDS:
                raise SystemExit(f"No step ended in {STEP_TIMEOUT_SECONDS:.0f} s:\n{tail(log)}")
            if not select.select([source], [], [], 0.5)[0]:
                continue
            text = os.read(source, 4096).decode()
            if not text:  # rank 0 has not opened the pipe yet, or has closed it
                time.sleep(0.05)
                continue
            last_news = time.monotonic()
            if is_due and int(text.split()[-1]) >= fault_at:
                is_due = False
                fault()
    finally:
        os.close(source)
    if ranks.returncode != 0:
        raise SystemExit(f"The ranks ended with status {ranks.returncode}:\n{tail(log)}")


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--steps", type=int, help="counted steps of a run; default: by size and mode"
    )
    parser.add_argument("--all", action="store_true", help="all sizes and modes")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: 1M")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: async")
    parser.add_argument(
        "--tries",
        type=int,
        help="maximum number of runs of a condition, if the host disturbs them; default: 2, or 6 "
        "with --all",
    )
    parser.add_argument(
        "--keep", type=Path, help="folder in which the records of all steps are kept"
    )
    options = parser.parse_args()
    options.sizes = options.sizes or (list(SIZES) if options.all else ["1M"])
    options.modes = options.modes or (list(MODES) if options.all else ["async"])
    options.tries = options.tries or (6 if options.all else 2)
    return options


def main() -> int:
    options = parse_arguments()
    # SIGTERM acts as Ctrl-C does: everything that was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Rank 0 wakes this process up after each step. As batch work, this process, torchrun and the
    # servers take no core from a rank that computes. The ranks undo the setting that they inherit.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    outcomes: dict[str, Outcome] = {}
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as name:
        for size in (SIZES[size] for size in options.sizes):
            model, _ = make_model(Path(name), size.name)
            for fault in options.conditions:
                for mode in options.modes:
                    condition = Condition(size, fault, mode)
                    steps = options.steps or condition.steps
                    outcome = run_undisturbed(condition, model, steps, options)
                    outcomes[condition.name] = outcome
                    print(row(condition.name, condition.size.wire, outcome), flush=True)
            shutil.rmtree(model)
    verdicts = judge(outcomes)
    for ok, line in verdicts.lines:
        print(f"{'ok  ' if ok else 'FAIL'} {line}")
    figures = figures_of(outcomes)
    return finish(options, "boundary_stall", verdicts.ok, figures)


if __name__ == "__main__":
    sys.exit(main())
