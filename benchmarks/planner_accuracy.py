# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares what `torchtitan-grpo plan` predicts with real runs.

    python benchmarks/planner_accuracy.py [--json] [--steps 24] [--keep FOLDER]

The planner is calibrated (``--from``) with one short run, and predicts the samples a second of five
others, which are then run. Servers are timed (`stub_server.py`): a step sleeps for a fixed time. Training
is timed as well (`timed_loss.py`): it sleeps for each trained token, and for half as long with twice the
devices. They stand for devices that this machine does not have; all else is real. Two of the runs, marked
`held out`, were not looked at while the planner was written.

Then the best split of the same number of devices is measured, by running all splits, for three weights of
training, and compared with the planner's. For each, the planner is calibrated with the split in the
middle only.

The exit status is 1 if a prediction is wrong by more than 15 %, or if a split that the planner chose has
less than 0.9 of the samples a second of the best one. The benchmark takes about 12 minutes. With
``--json`` the last line is a JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from stub_servers import running_stubs

from torchtitan.grpo.command_line.reading import read_config
from torchtitan.grpo.plan.measured import read_run
from torchtitan.grpo.plan.search import Plan, Split, best_split, spread
from torchtitan.grpo.plan.system import System

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "assets/reverse_digits/model"
GROUP_SIZE, MEAN_TOKENS, SEQ_LEN = 8, 50, 256
DECODE_SECONDS = 0.02
IN_FLIGHT = 32  # completions for each server
WARM_UP_STEPS = 5
MOST_ERROR, LEAST_SHARE = 0.15, 0.9
RUN_SECONDS = 300.0


@dataclass(frozen=True)
class Case:
    """``token_seconds`` are of a trained token on one training device."""

    name: str
    num_ranks: int = 1
    num_servers: int = 2
    staleness: int = 1
    prompts: int = 8
    new_tokens: int = 100
    token_seconds: float = 5e-4
    is_held_out: bool = False


BASE = Case("calibration")
CASES = (
    Case("4 servers", num_servers=4),
    Case("synchronous", staleness=0),
    Case("12 prompts, bound 2", prompts=12, staleness=2),
    Case("longer completions", new_tokens=160, is_held_out=True),
    Case("3 ranks, 3 servers", num_ranks=3, num_servers=3, is_held_out=True),
)
NUM_DEVICES = 4
SPLIT_WEIGHTS = (2e-4, 6e-4, 2e-3)


def settings_of(case: Case, folder: Path, steps: int) -> dict[str, object]:
    loss = REPOSITORY / "benchmarks/timed_loss.py"
    return {
        "job.dump_folder": folder,
        "model.hf_assets_path": MODEL,
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": 4,
        "training.mixed_precision_param": "float32",
        "training.steps": steps,
        "optimizer.implementation": "foreach",
        "optimizer.lr": 1e-6,
        "lr_scheduler.warmup_steps": 0,
        "activation_checkpoint.mode": "none",
        "debug.seed": 0,
        "grpo.group_size": GROUP_SIZE,
        "grpo.prompts_per_step": case.prompts,
        "grpo.policy_loss": f"{loss}:timed",
        "grpo.policy_loss_options.token_seconds": case.token_seconds / case.num_ranks,
        "prompts.path": REPOSITORY / "assets/reverse_digits/train.jsonl",
        "prompts.max_prompt_tokens": 16,
        "rollout.max_head_offpolicyness": case.staleness,
        "rollout.max_new_tokens": case.new_tokens,
        "rollout.max_concurrent_rollouts": IN_FLIGHT * case.num_servers,
        "inference.kind": "embedded",
        "inference.dtype": "float32",
        "reward.functions": "exact_match",
        "observe.progress": "none",
        "observe.samples_per_step": 16,
    }


def words_of(case: Case, folder: Path, steps: int) -> list[str]:
    return [f"--{key}={value}" for key, value in settings_of(case, folder, steps).items()]


def measure(case: Case, folder: Path, steps: int) -> float:
    """Runs a case, and returns its samples a second without the first steps."""
    folder.mkdir(parents=True)
    with running_stubs(
        case.num_servers, MODEL, folder, decode_seconds=DECODE_SECONDS, mean_tokens=MEAN_TOKENS,
        max_model_len=SEQ_LEN, max_running_requests=IN_FLIGHT * case.num_servers,
    ) as servers:  # fmt: skip
        run = folder / "run"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"),
            *("-m", "torchtitan.grpo_train", *words_of(case, run, steps)),
            f"--inference.urls={','.join(server.url for server in servers)}",
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS
        )
    if done.returncode != 0:
        raise SystemExit(f"The run failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = np.mean([record["time/step_seconds"] for record in records[WARM_UP_STEPS:]])
    return case.prompts * GROUP_SIZE / float(seconds)


def plan_from(run: Path, measured_case: Case, case: Case) -> Plan:
    """The plan of a case by what was measured in the run of another."""
    found = read_run(run)
    config = read_config(words_of(case, run, 1))
    old = Split(measured_case.num_ranks, measured_case.num_servers)
    system = System(
        config.grpo,
        replace(config.rollout, max_concurrent_rollouts=IN_FLIGHT * old.num_servers),
        found.costs, found.lengths, old.num_servers, prompt_tokens=found.prompt_tokens,
    )  # fmt: skip
    return Plan(system, old)


def check_cases(folder: Path, steps: int) -> tuple[dict[str, float], bool]:
    measure(BASE, folder / "calibration", steps)
    figures, holds = {}, True
    print(f"{'case':24}{'predicted':>12}{'measured':>12}{'error':>9}   samples a second")
    for number, case in enumerate(CASES):
        plan = plan_from(folder / "calibration/run", BASE, case)
        predicted = spread(plan.on(Split(case.num_ranks, case.num_servers)), 4).mean(
            "samples_per_second"
        )
        measured = measure(case, folder / f"case-{number}", steps)
        error = predicted / measured - 1
        figures[f"error/{case.name}"] = error
        holds = holds and abs(error) <= MOST_ERROR
        note = "  held out" if case.is_held_out else ""
        print(f"{case.name:24}{predicted:12.2f}{measured:12.2f}{error:+9.1%}{note}", flush=True)
    return figures, holds


def check_splits(folder: Path, steps: int) -> tuple[dict[str, float], bool]:
    figures, holds = {}, True
    for weight in SPLIT_WEIGHTS:
        cases = {
            ranks: replace(
                BASE, num_ranks=ranks, num_servers=NUM_DEVICES - ranks, token_seconds=weight
            )
            for ranks in range(1, NUM_DEVICES)
        }
        own = folder / f"split-{weight}"
        rates = {ranks: measure(case, own / str(ranks), steps) for ranks, case in cases.items()}
        middle = NUM_DEVICES // 2
        plan = plan_from(own / str(middle) / "run", cases[middle], cases[middle])
        chosen = best_split(plan, NUM_DEVICES)[0].num_ranks
        share = rates[chosen] / max(rates.values())
        figures[f"split/{weight:g}"] = share
        holds = holds and share >= LEAST_SHARE
        shown = ", ".join(f"{ranks}: {rate:.2f}" for ranks, rate in rates.items())
        print(
            f"{NUM_DEVICES} devices, {1e3 * weight:g} ms for a trained token: samples a second by training "
            f"devices {shown}; chosen {chosen}, {share:.2f} of the best",
            flush=True,
        )
    return figures, holds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    parser.add_argument("--steps", type=int, default=24, help="steps of a run")
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planner-accuracy-") as temporary:
        folder = options.keep or Path(temporary)
        figures, are_near = check_cases(folder, options.steps)
        splits, are_good = check_splits(folder, options.steps)
    holds = are_near and are_good
    print(
        f"{'ok  ' if holds else 'FAIL'} a prediction may be wrong by {MOST_ERROR:.0%}, and a chosen split "
        f"must reach {LEAST_SHARE} of the best"
    )
    if options.json:
        print(
            json.dumps(
                {"benchmark": "planner_accuracy", "ok": holds, "figures": figures | splits},
                allow_nan=False,
            )
        )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
