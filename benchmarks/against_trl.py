# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trains SmolLM2-135M-Instruct with this trainer and with TRL's GRPOTrainer, on the same task and machine.

    bash scripts/get_smollm2.sh && bash scripts/install_trl.sh
    python benchmarks/against_trl.py [--json] [--seeds 0 1 2] [--dtypes float32 bfloat16] [--steps 12]
        [--modes sync async] [--prompts 8] [--trl-processes 1] [--picture FILE.png] | --check

Equal on both sides: the arithmetic task in an order of the seed, the tokens of the prompts, the reward (the
share of right digits; right answers alone are so rare at first that runs of equal settings begin to learn
many steps apart), 8 prompts with 8 completions of at most 24 tokens in a step, temperature 0.8, advantages,
the clipped loss as the mean over all tokens of a batch, one step of AdamW for each batch, a constant
learning rate, float32 weights that are computed with in float32 or bfloat16 (autocast in TRL), all
activations kept, and two cores. ``sync`` generates with the newest weights, as TRL does; ``async``, this
trainer's default, generates the next batch while it trains. Every process has two threads
(``--trl-processes 2``: two processes with one), and all processes of a side the same two cores. Different: with
bfloat16, TRL generates under autocast, which casts all weights for each token, and this trainer's server
holds them in bfloat16. The random numbers of sampling differ, and so does the importance weight between
server and trainer, which TRL has with vLLM only. Not compared: TRL with vLLM, GPUs, evaluation,
checkpoints.

Times of steps are those that a side notes itself, without the first step; seconds to a reward of 0.5 (mean of
five steps) count from the start of the command, loading included. Memory is the largest sum of the resident sizes of a side's
processes, in which shared pages count repeatedly. The machine must be quiet. The exit status is 1 unless
each mode takes at most half of TRL's time for a step, and its reward in the last quarter of the steps is at
most two standard errors below TRL's (of the means of the seeds; with one seed, of its steps). Without
options, seed 0 is run in bfloat16, which takes about 13 minutes; each further seed takes as long, and float32 about
twice as long.

``--check`` tests that both compute the same: this trainer records three synchronous steps in float32, and
TRL trains on the recorded completions. Its tokens of the prompts must be those of the record, and rewards,
losses and norms of gradients must agree in each step. With ``--json`` the last line is an object.
"""

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import psutil
from figures import finish, make_parser

from torchtitan.grpo.data.record import RecordReader

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "assets/smollm2/model"
TRL_PYTHON = REPOSITORY / ".venv-trl/bin/python"
SUFFIX = " Write the calculation and its result in one line."
SHARED = {
    "model": str(MODEL), "group_size": 8, "max_new_tokens": 24, "temperature": 0.8, "lr": 2e-5, "beta2": 0.999,
}  # fmt: skip
OWN = f"""
model.hf_assets_path={MODEL} training.seq_len=320 training.local_batch_size=4 training.max_norm=1.0
optimizer.lr={SHARED["lr"]} optimizer.beta2={SHARED["beta2"]} optimizer.weight_decay=0.0
optimizer.implementation=fused lr_scheduler.warmup_steps=0 lr_scheduler.decay_ratio=0.0
activation_checkpoint.mode=none grpo.group_size={SHARED["group_size"]} prompts.shuffle=false
prompts.max_prompt_tokens=96 rollout.max_new_tokens={SHARED["max_new_tokens"]}
rollout.temperature={SHARED["temperature"]} inference.kind=embedded inference.launch=true
inference.max_model_len=128 reward.functions={REPOSITORY}/benchmarks/arithmetic_reward.py:right_digits
observe.progress=none
"""
OFFPOLICYNESS = {"sync": 0, "async": 1}
CORES = 2
KEYS = {
    "seconds": ("time/step_seconds", "seconds"), "reward": ("reward/mean", "reward"),
    "tokens": ("rollout/completion_tokens_mean", "completions/mean_length"),
    "loss": ("loss/total", "loss"), "grad_norm": ("grad_norm", "grad_norm"),
}  # fmt: skip
"""Metrics of a step, by their names in the records of this trainer and of TRL."""
RUNNING_STEPS, GOAL, MOST_TIME = 5, 0.5, 0.5
RUN_SECONDS, SAMPLE_SECONDS, END_SECONDS = 7200.0, 0.25, 20.0
CHECK_BOUNDS = {"reward": 1e-6, "loss": 1e-3, "grad_norm": 1e-3}


@dataclass
class Run:
    """The metrics of each step of a run, by ``KEYS``; ``arrivals`` are in s from the start of the command."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    peak_gib: float = 0.0

    @property
    def seconds(self) -> list[float]:
        return self.metrics["seconds"][1:]

    def quarter(self, index: int) -> list[float]:
        """Returns the rewards in a quarter of the steps, from 0 to 3; at least one."""
        rewards = self.metrics["reward"]
        begin, end = (len(rewards) * i // 4 for i in (index, index + 1))
        return rewards[begin : max(end, begin + 1)]

    def running_reward(self) -> list[float]:
        rewards = self.metrics["reward"]
        return [mean(rewards[max(i - RUNNING_STEPS, 0) : i]) for i in range(1, len(rewards) + 1)]

    def seconds_to_goal(self) -> float:
        late = [*zip(self.running_reward(), self.arrivals, strict=True)][RUNNING_STEPS - 1 :]
        return next((seconds for reward, seconds in late if reward >= GOAL), math.inf)


def write_data(path: Path, seed: int) -> None:
    """Writes the task as chat messages, in an order of the seed, which both sides keep."""
    lines = (REPOSITORY / "assets/arithmetic/train.jsonl").read_text().splitlines()
    random.Random(seed).shuffle(lines)
    with path.open("w") as file:
        for row in map(json.loads, lines):
            messages = [{"role": "user", "content": row["prompt"] + SUFFIX}]
            file.write(json.dumps({"prompt": messages, "answer": row["answer"]}) + "\n")


def command_of(side: str, job: dict[str, Any], folder: Path) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    if side == "trl":
        (folder / "job.json").write_text(json.dumps(SHARED | job))
        launcher = [*torchrun, str(job["processes"])] if job["processes"] > 1 else []
        return [
            str(TRL_PYTHON),
            *launcher,
            f"{REPOSITORY}/benchmarks/against_trl_run.py",
            str(folder),
        ]
    settings = {
        "job.dump_folder": folder,
        "training.steps": job["steps"],
        "training.mixed_precision_param": job["dtype"],
        "debug.seed": job["seed"],
        "grpo.prompts_per_step": job["prompts"],
        "prompts.path": job["data"],
        "rollout.max_head_offpolicyness": OFFPOLICYNESS[side],
        "rollout.max_concurrent_rollouts": job["prompts"] * SHARED["group_size"],
        "inference.dtype": job["dtype"],
    } | ({"rollout.record": job["record"]} if "record" in job else {})
    words = [*OWN.split(), *(f"{key}={value}" for key, value in settings.items())]
    own = ["-m", "torchtitan.grpo_train", *(f"--{word}" for word in words)]
    return [sys.executable, *torchrun, "1", *own]


def resident_gib(members: set[psutil.Process]) -> float:
    total = 0
    for member in members:
        with contextlib.suppress(psutil.Error):
            total += member.memory_info().rss
    return total / 2**30


def end(process: psutil.Popen, members: set[psutil.Process]) -> None:
    """Ends a process, and then those of its ``members`` that it has left behind."""
    with contextlib.suppress(psutil.Error):
        process.terminate()
    for member in psutil.wait_procs(members, END_SECONDS)[1]:
        with contextlib.suppress(psutil.Error):
            member.kill()
    psutil.wait_procs(members, END_SECONDS)


def run_side(side: str, job: dict[str, Any], folder: Path) -> Run:
    """Runs a side in a new folder; raises SystemExit if it fails or takes longer than ``RUN_SECONDS``."""
    folder.mkdir()
    # Of a check, times do not matter, and on a busy machine threads wait for each other.
    threads = 1 if "record" in job or (job["processes"] > 1 and side == "trl") else CORES
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if side != "trl":
        settings["OMP_WAIT_POLICY"] = "PASSIVE"  # as `torchtitan-grpo train` sets it
    run, records, log = Run(), folder / "metrics.jsonl", folder.with_suffix(".log")
    command, begin, lines = command_of(side, job, folder), time.monotonic(), []
    with log.open("w") as output:
        process = psutil.Popen(
            command, env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT
        )
        members: set[psutil.Process] = {process}
        try:
            status = None
            while status is None and time.monotonic() < begin + RUN_SECONDS:
                time.sleep(SAMPLE_SECONDS)
                status = process.poll()
                with contextlib.suppress(psutil.Error):
                    members.update(process.children(recursive=True))
                run.peak_gib = max(run.peak_gib, resident_gib(members))
                lines = records.read_text().splitlines() if records.exists() else []
                run.arrivals += [time.monotonic() - begin] * (len(lines) - len(run.arrivals))
        finally:
            end(process, members)
    if status != 0 or len(lines) != job["steps"]:
        what = f"took over {RUN_SECONDS:g} s" if status is None else f"ended with {status}"
        raise SystemExit(f"{side} {what} after {len(lines)} steps:\n{log.read_text()[-6000:]}")
    steps = [json.loads(line) for line in lines]
    run.metrics = {key: [s[names[side == "trl"]] for s in steps] for key, names in KEYS.items()}
    print(
        f"{side:5} {job['dtype']:8} seed {job['seed']}: {median(run.seconds):.2f} s a step, reward "
        f"{mean(run.metrics['reward']):.3f}, {run.arrivals[-1]:.0f} s in all",
        flush=True,
    )
    return run


def spread(values: Sequence[float], form: str = ".3f") -> str:
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def report(dtype: str, runs: dict[str, list[Run]], samples: int) -> tuple[dict[str, float], bool]:
    """Prints the table and the verdicts of a data type, for the runs of each side with all seeds."""
    rows: dict[str, tuple[str, Callable[[Run], list[float]]]] = {
        f"reward, quarter {i + 1}": (".3f", lambda run, i=i: [mean(run.quarter(i))])
        for i in range(4)
    } | {
        "tokens of a completion": (".1f", lambda run: [mean(run.metrics["tokens"])]),
        "s of a step, median": (".2f", lambda run: [median(run.seconds)]),
        "s of a step": (".2f", lambda run: run.seconds),
        "samples/s": (".2f", lambda run: [samples / mean(run.seconds)]),
        f"s to reward {GOAL:g}": (".0f", lambda run: [run.seconds_to_goal()]),
        "peak memory, GiB": (".2f", lambda run: [run.peak_gib]),
    }
    figures: dict[str, float] = {}
    print(f"\n{dtype:24}" + "".join(f"{side:30}" for side in runs))
    for name, (form, of_run) in rows.items():
        cells = []
        for side, of_side in runs.items():
            values = [value for run in of_side for value in of_run(run)]
            is_reached = max(values) < math.inf
            reached = f"reached by {sum(map(math.isfinite, values))} of {len(values)}"
            cells.append(spread(values, form) if is_reached else reached)
            figures |= {f"{dtype}/{side}/{name}": mean(values)} if is_reached else {}
        print(f"{name:24}" + "".join(f"{cell:30}" for cell in cells))
    last = {side: [mean(run.quarter(3)) for run in of_side] for side, of_side in runs.items()}
    if len(runs["trl"]) == 1:
        last = {side: of_side[0].quarter(3) for side, of_side in runs.items()}
    errors = {s: stdev(v) / math.sqrt(len(v)) if len(v) > 1 else 0.0 for s, v in last.items()}
    holds = True
    for side in [*runs][1:]:
        pairs = zip(runs[side], runs["trl"], strict=True)
        ratios = [median(own.seconds) / median(trl.seconds) for own, trl in pairs]
        gap = mean(last[side]) - mean(last["trl"])
        bound = 2 * math.hypot(errors[side], errors["trl"])
        figures[f"{dtype}/{side}/time ratio"] = median(ratios)
        holds &= median(ratios) <= MOST_TIME and gap >= -bound
        print(
            f"{side}: {spread(ratios)} of TRL's time for a step (bound {MOST_TIME}); the rewards of the last "
            f"quarter {'agree' if abs(gap) <= bound else 'differ'}: {gap:+.3f}, two standard errors {bound:.3f}"
        )
    return figures, holds


def draw(path: Path, runs: dict[str, dict[str, list[Run]]]) -> None:
    """Draws the running mean of the reward over steps and over time, with a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), 2, sharey=True, squeeze=False)
    for (left, right), (dtype, of_dtype) in zip(grid, runs.items(), strict=True):
        for color, (side, of_side) in enumerate(of_dtype.items()):
            for index, run in enumerate(of_side):
                rewards, minutes = run.running_reward(), [s / 60 for s in run.arrivals]
                left.plot(range(1, len(rewards) + 1), rewards, f"C{color}")
                label = None if index else {"trl": "TRL"}.get(side, f"torchtitan-grpo, {side}")
                right.plot(minutes, rewards, f"C{color}", label=label)
        left.set(xlabel="step", ylabel=f"reward ({dtype}), mean of {RUNNING_STEPS} steps")
        right.set(xlabel="minutes")
        right.legend(frameon=False)
    figure.savefig(path, dpi=120)


def check(job: dict[str, Any], folder: Path) -> tuple[dict[str, float], bool]:
    """Trains TRL on the completions of a run of this trainer, and compares each step."""
    job = job | {"dtype": "float32", "steps": 3, "record": str(folder / "record.jsonl")}
    own = run_side("sync", job, folder / "sync")
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    reader = RecordReader(job["record"], vocab_size, SHARED["temperature"], "rollout.record")
    with (folder / "replay.jsonl").open("w") as file:
        for _, batch in reader:
            groups = [group.rollouts for group in batch.groups]
            line = [[g[0].prompt_ids.tolist(), [r.token_ids.tolist() for r in g]] for g in groups]
            file.write(json.dumps(line) + "\n")
    trl = run_side("trl", job | {"replay": str(folder / "replay.jsonl")}, folder / "trl")
    figures: dict[str, float] = {}
    for name, bound in CHECK_BOUNDS.items():
        pairs = [*zip(own.metrics[name], trl.metrics[name], strict=True)]
        figures[name] = max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)
        print(f"{name}: largest relative difference {figures[name]:.2g}, bound {bound:g}; {pairs}")
    is_vacuous = not any(own.metrics["grad_norm"])  # no group had rewards that differ
    return figures, not is_vacuous and all(figures[n] <= b for n, b in CHECK_BOUNDS.items())


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["bfloat16"]
    )
    parser.add_argument("--modes", nargs="+", choices=[*OFFPOLICYNESS], default=[*OFFPOLICYNESS])
    parser.add_argument("--steps", type=int, default=12, help="steps of a run, at least 2")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--trl-processes", type=int, choices=[1, 2], default=1)
    parser.add_argument("--picture", type=Path, help="file for the curves of the reward")
    parser.add_argument("--check", action="store_true", help="only compare losses on one record")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # processes that are started inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    for path, script in ((MODEL, "get_smollm2.sh"), (TRL_PYTHON, "install_trl.sh")):
        if not path.exists():
            parser.error(f"{path} must exist. Run `bash scripts/{script}`.")
    runs = {dtype: {side: [] for side in ("trl", *options.modes)} for dtype in options.dtypes}
    job = {"steps": options.steps, "prompts": options.prompts, "processes": options.trl_processes}
    figures, ok = {}, True
    with tempfile.TemporaryDirectory(prefix="against-trl-") as name:
        folder = Path(name)
        for seed in options.seeds:
            job |= {"seed": seed, "data": str(folder / f"{seed}.jsonl")}
            write_data(folder / f"{seed}.jsonl", seed)
            if options.check:
                figures, ok = check(job, folder)
                break
            for dtype, of_dtype in runs.items():
                for side, of_side in of_dtype.items():
                    place = folder / f"{side}-{dtype}-{seed}"
                    of_side.append(run_side(side, job | {"dtype": dtype}, place))
    for dtype, of_dtype in {} if options.check else runs.items():
        found, holds = report(dtype, of_dtype, options.prompts * SHARED["group_size"])
        figures, ok = figures | found, ok and holds
    if options.picture and not options.check:
        draw(options.picture, runs)
    return finish(options, "against_trl", ok, figures)


if __name__ == "__main__":
    sys.exit(main())
