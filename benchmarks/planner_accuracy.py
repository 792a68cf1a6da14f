# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares what `torchtitan-grpo plan` prints with real runs.

    python benchmarks/planner_accuracy.py [--json] [--keep FOLDER] [--known]

The planner is calibrated (``--from``) with one short run without lending and one with it, and predicts the
samples a second of seven others, which are then run. Servers are timed (`stub_server.py`): a step sleeps for
a fixed time. Training is timed as well (`timed_loss.py`): a trained token takes a fixed time, and half as
long with twice the devices. They stand for devices that this machine does not have; all else is real. Two
of the runs, marked `held out`, were not looked at while the planner was written; ``--known`` leaves them out.

Then the best split of four devices is measured in three cases, by running all splits, and compared with the
planner's. In each case, the planner is calibrated with the split in the middle only.

The exit status is 1 if a prediction is wrong by more than 15 %, or if a split that the planner names is not
the best of those measured, or if a plan for 10,000 devices takes more than 10 s. The benchmark takes about
12 minutes. ``--keep`` keeps the runs, and uses those that are there already. With ``--json`` the last line is
a JSON object.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from figures import finish, make_parser

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "assets/reverse_digits/model"
PROGRAM = Path(sys.executable).with_name("torchtitan-grpo")
GROUP_SIZE, MEAN_TOKENS, SEQ_LEN = 8, 12, 64
DECODE_SECONDS = 0.05
STEPS, WARM_UP_STEPS = 16, 4
MOST_ERROR, MOST_SECONDS = 0.15, 10.0
RUN_SECONDS = 300.0


@dataclass(frozen=True)
class Case:
    """``token_seconds`` is for a trained token on one training device, ``in_flight`` for each server."""

    name: str
    num_ranks: int = 2
    num_servers: int = 2
    num_lent: int = 0  # of the servers
    staleness: int = 1
    prompts: int = 8
    new_tokens: int = 26
    in_flight: int = 32
    token_seconds: float = 1.5e-3
    is_held_out: bool = False

    @property
    def settings(self) -> list[str]:
        values = {
            "model.hf_assets_path": MODEL,
            "training.seq_len": SEQ_LEN,
            "training.local_batch_size": 4,
            "training.mixed_precision_param": "float32",
            "training.steps": STEPS,
            "optimizer.implementation": "foreach",
            "optimizer.lr": 1e-6,
            "lr_scheduler.warmup_steps": 0,
            "activation_checkpoint.mode": "none",
            "debug.seed": 0,
            "grpo.group_size": GROUP_SIZE,
            "grpo.prompts_per_step": self.prompts,
            "grpo.policy_loss": f"{REPOSITORY / 'benchmarks/timed_loss.py'}:timed",
            "grpo.policy_loss_options.token_seconds": self.token_seconds / self.num_ranks,
            "prompts.path": REPOSITORY / "assets/reverse_digits/train.jsonl",
            "prompts.max_prompt_tokens": 16,
            "rollout.max_head_offpolicyness": self.staleness,
            "rollout.max_new_tokens": self.new_tokens,
            "rollout.max_concurrent_rollouts": self.in_flight * self.num_servers,
            "inference.launch": "true",
            **self._servers,
            "inference.dtype": "float32",
            # Nothing is computed, so one step may take all prompts.
            "inference.max_batched_tokens": self.in_flight * SEQ_LEN,
            "reward.functions": "exact_match",
            "observe.progress": "none",
        }
        return [f"--{key}={value}" for key, value in values.items()]

    @property
    def _servers(self) -> dict[str, object]:
        if self.num_lent in (0, self.num_servers):
            is_lent = str(self.num_lent > 0).lower()
            return {"inference.num_servers": self.num_servers, "inference.lend": is_lent}
        return {
            "cluster.both.tags": "train,rollout",
            "cluster.both.num_servers": self.num_lent,
            "cluster.other.tags": "rollout",
            "cluster.other.num_servers": self.num_servers - self.num_lent,
        }


PLAIN, LENT = Case("plain"), Case("lent", num_lent=2, token_seconds=1e-3)
CASES = (
    replace(PLAIN, name="4 servers", num_servers=4),
    replace(PLAIN, name="synchronous, 12 prompts", prompts=12, staleness=0),
    replace(PLAIN, name="longer, 3 servers", num_servers=3, new_tokens=40),
    replace(LENT, name="all lent, synchronous, longer", staleness=0, new_tokens=40),
    replace(LENT, name="3 servers, 1 lent", num_servers=3, num_lent=1, prompts=12),
    replace(PLAIN, name="bound 2, 12 prompts", prompts=12, staleness=2, is_held_out=True),
    replace(
        LENT, name="3 servers, all lent", num_servers=3, num_lent=3, prompts=12, is_held_out=True
    ),
)
NUM_DEVICES = 4
MIDDLES = (
    replace(PLAIN, name="16 in flight", in_flight=16, token_seconds=6e-4),
    PLAIN,
    replace(PLAIN, token_seconds=7.5e-3),
)


class Runs:
    """Runs cases, each once, below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._python = folder / "python"
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, str(REPOSITORY / "benchmarks/stub_server.py")]
        words += ["--decode-seconds", str(DECODE_SECONDS), "--mean-tokens", str(MEAN_TOKENS)]
        # Launched as an interpreter of the embedded server, it runs the timed one instead.
        skip = 'while [ "$1" != torchtitan.grpo.inference.embedded ]; do shift; done; shift'
        self._python.write_text(f'#!/bin/sh\n{skip}\nexec {" ".join(words)} "$@"\n')
        self._python.chmod(0o755)
        self.measure = cache(self._measure)

    def _measure(self, case: Case) -> tuple[Path, float]:
        """Returns the run's folder, and its samples a second without the first steps."""
        name = re.sub(r"\W+", "-", f"{case.name}-{case.num_ranks}-{case.token_seconds}")
        run = self._folder / name
        if not (run / "summary.json").exists():
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc_per_node=1", "-m", "torchtitan.grpo_train", *case.settings),
                *(f"--job.dump_folder={run}", f"--inference.python={self._python}"),
            ]
            environment = os.environ | {
                "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
            }  # fmt: skip
            _output(command, environment)
            # One process has trained as fast as the case's ranks do, and sleeping needs no core.
            as_told = {"num_ranks": case.num_ranks, "devices": ["timed"]}
            for file in run.glob("starts/*/environment.json"):
                known = json.loads(file.read_text())
                file.write_text(json.dumps(known | as_told, allow_nan=False))
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seconds = statistics.fmean(r["time/step_seconds"] for r in records[WARM_UP_STEPS:])
        return run, case.prompts * GROUP_SIZE / seconds


def planned(case: Case, run: Path, *options: str) -> str:
    """What the planner prints of a case by what was measured in the run."""
    words = [PROGRAM, "plan", "--from", run, "--nproc", case.num_ranks, *case.settings, *options]
    return _output([str(word) for word in words], dict(os.environ))


def _output(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    if done.returncode != 0:
        raise SystemExit(f"{command} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def check_cases(runs: Runs, *, with_held_out: bool) -> tuple[dict[str, float], bool]:
    figures, holds = {}, True
    print(f"{'case':32}{'predicted':>12}{'measured':>12}{'error':>9}   samples a second")
    for case in CASES:
        if case.is_held_out and not with_held_out:
            continue
        calibration, _ = runs.measure(LENT if case.num_lent else PLAIN)
        (text,) = re.findall(r"samples a second +(\S+) ", planned(case, calibration))
        _, measured = runs.measure(case)
        error = float(text) / measured - 1
        figures[f"error/{case.name}"] = error
        holds = holds and abs(error) <= MOST_ERROR
        note = "  held out" if case.is_held_out else ""
        print(f"{case.name:32}{float(text):12.2f}{measured:12.2f}{error:+9.1%}{note}", flush=True)
    return figures, holds


def check_splits(runs: Runs) -> tuple[dict[str, float], bool]:
    figures, holds = {}, True
    for middle in MIDDLES:
        cases = {
            ranks: replace(middle, num_ranks=ranks, num_servers=NUM_DEVICES - ranks)
            for ranks in range(1, NUM_DEVICES)
        }
        rates = {ranks: runs.measure(case)[1] for ranks, case in cases.items()}
        text = planned(middle, runs.measure(middle)[0], f"--devices={NUM_DEVICES}")
        (named,) = re.findall(r"best split of .*\n  (\d+) training rank", text)
        chosen, best = int(named), max(rates, key=rates.__getitem__)
        figures[f"split/{middle.in_flight}/{middle.token_seconds:g}"] = rates[chosen] / rates[best]
        holds = holds and chosen == best
        shown = ", ".join(f"{ranks}: {rate:.1f}" for ranks, rate in rates.items())
        print(
            f"{1e3 * middle.token_seconds:g} ms for a trained token, {middle.in_flight} completions for a "
            f"server: samples a second by training devices {shown}; best {best}, named {chosen}",
            flush=True,
        )
    return figures, holds


def check_seconds() -> tuple[dict[str, float], bool]:
    """The whole command for 10,000 devices, with a batch that keeps them busy."""
    words = [str(PROGRAM), "plan", str(REPOSITORY / "train_configs/quickstart.toml")]
    words += [f"--model.hf_assets_path={MODEL}", "--devices=10000", "--grpo.prompts_per_step=4096"]
    begin = time.monotonic()
    _output(words, dict(os.environ))
    seconds = time.monotonic() - begin
    print(f"a plan for 10,000 devices took {seconds:.1f} s, at most {MOST_SECONDS:g} s")
    return {"seconds/10000 devices": seconds}, seconds <= MOST_SECONDS


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--keep", type=Path, help="folder in which runs are kept, and found again")
    parser.add_argument("--known", action="store_true", help="leave out the cases held out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planner-accuracy-") as temporary:
        runs = Runs(options.keep or Path(temporary))
        figures, are_near = check_cases(runs, with_held_out=not options.known)
        splits, are_best = check_splits(runs)
    seconds, is_fast = check_seconds()
    holds = are_near and are_best and is_fast
    print(
        f"{'ok  ' if holds else 'FAIL'} a prediction may be wrong by {MOST_ERROR:.0%}, and the split that "
        "the planner names must be the best"
    )
    return finish(options, "planner_accuracy", holds, figures | splits | seconds)


if __name__ == "__main__":
    sys.exit(main())
