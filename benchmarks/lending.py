# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures what lending the training devices to servers gains, and what it costs where it gains nothing.

    python benchmarks/lending.py [--json] [--rounds 3] [--steps 16]

One server has devices of its own, and a second one is lent those of the training rank (``[cluster]``).
Each run is compared with the same run without the second server. In one pair, generating a batch takes
one server three times as long as training on it; in the other pair, it takes as long. The parts are
timed: a server sleeps in each decode step (`stub_server.py`), and training sleeps for each trained token
(`timed_loss.py`), so that the devices need no cores. All else is real: the scheduler, the lanes and
their pushes, cut requests, and the ranks' room.

``bound`` is how many times as many samples a second the scheduler says are possible
(`LendScheduler.bound`), by the times that the runs of the round took. The exit status is 1 if, over all
rounds, lending reaches less than 0.8 of the gain that is possible, or makes the balanced run more than
2 % slower. The benchmark takes about 10 minutes. With ``--json`` the last line is a JSON object.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from figures import finish, make_parser

from torchtitan.grpo.rollout.lending.scheduler import LendScheduler

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "assets/reverse_digits/model"
PROMPTS, GROUP_SIZE, MEAN_TOKENS, NEW_TOKENS = 32, 4, 20, 60
TOKEN_SECONDS = 3e-4  # of training
WARM_UP_STEPS = 4
LEAST_PART, MOST_LOSS = 0.8, 0.02
RUN_SECONDS = 300.0


@dataclass(frozen=True)
class Setting:
    """A server writes ``in_flight`` tokens, one of each completion, in ``decode_seconds``."""

    name: str
    in_flight: int
    decode_seconds: float


SETTINGS = (Setting("3:1", 16, 0.02), Setting("balanced", 48, 0.02))


@dataclass(frozen=True)
class Measured:
    """Seconds are means over the steps of a run."""

    step: float
    train: float
    wake: float = 0.0
    sleep: float = 0.0
    room: float = 0.0
    lent: float = 0.0
    late: float = 0.0
    tokens_fraction: float = 0.0

    @property
    def samples_per_second(self) -> float:
        return PROMPTS * GROUP_SIZE / self.step


def stub(setting: Setting, folder: Path) -> Path:
    """Writes an interpreter that runs the timed server in place of the embedded one."""
    own = REPOSITORY / "benchmarks/stub_server.py"
    path = folder / "python"
    path.write_text(
        "#!/bin/bash\n"
        "# Drops the interpreter's options and the name of the module.\n"
        'while [ "$1" != torchtitan.grpo.inference.embedded ]; do shift; done; shift\n'
        f"exec {sys.executable} {own} --decode-seconds {setting.decode_seconds} "
        f'--mean-tokens {MEAN_TOKENS} "$@"\n'
    )
    path.chmod(0o755)
    return path


def words_of(setting: Setting, folder: Path, steps: int, *, lends: bool) -> list[str]:
    num_servers = 2 if lends else 1
    rows = {"cluster.own.tags": "rollout"}
    if lends:
        rows["cluster.shared.tags"] = "train,rollout"
    settings = rows | {
        "job.dump_folder": folder / "run",
        "model.hf_assets_path": MODEL,
        "training.seq_len": 256,
        "training.local_batch_size": 8,
        "training.mixed_precision_param": "float32",
        "training.steps": steps,
        "optimizer.implementation": "foreach",
        "optimizer.lr": 1e-6,
        "lr_scheduler.warmup_steps": 0,
        "activation_checkpoint.mode": "none",
        "debug.seed": 0,
        "grpo.group_size": GROUP_SIZE,
        "grpo.prompts_per_step": PROMPTS,
        "grpo.policy_loss": f"{REPOSITORY / 'benchmarks/timed_loss.py'}:timed",
        "grpo.policy_loss_options.token_seconds": TOKEN_SECONDS,
        "prompts.path": REPOSITORY / "assets/reverse_digits/train.jsonl",
        "prompts.max_prompt_tokens": 16,
        "rollout.max_head_offpolicyness": 1,
        "rollout.max_new_tokens": NEW_TOKENS,
        "rollout.max_concurrent_rollouts": setting.in_flight * num_servers,
        "inference.kind": "embedded",
        "inference.launch": "true",
        "inference.python": stub(setting, folder),
        "inference.dtype": "float32",
        "reward.functions": "exact_match",
        "observe.progress": "none",
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def measure(setting: Setting, folder: Path, steps: int, *, lends: bool) -> Measured:
    folder.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"),
        *("-m", "torchtitan.grpo_train", *words_of(setting, folder, steps, lends=lends)),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    if done.returncode != 0:
        raise SystemExit(f"The run failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if "time/step_seconds" in r][WARM_UP_STEPS:]

    def of_step(name: str) -> float:
        return mean(record.get(name, 0.0) for record in records)

    def of_loan(name: str) -> float:
        loans = [record[name] for record in records if record.get("lend/wakes")]
        return mean(loans) if loans else 0.0

    step = of_step("time/step_seconds")
    return Measured(
        step=step,
        train=step - of_step("time/wait_data_seconds"),
        wake=of_loan("lend/wake_seconds"),
        sleep=of_loan("lend/sleep_seconds"),
        room=of_loan("lend/room_give_seconds"),
        lent=of_step("lend/lent_seconds"),
        late=of_step("lend/late_seconds"),
        tokens_fraction=of_step("lend/tokens_fraction"),
    )


def possible(own: Measured, lending: Measured) -> float:
    """How many times as many samples a second lending allows, by the times of both runs."""
    scheduler = LendScheduler(0.0)
    scheduler.observe_room(lending.room)
    scheduler.observe_wake(lending.wake)
    scheduler.observe_sleep(lending.sleep)
    rate = PROMPTS / own.step  # one server generates all the time
    return scheduler.bound(own.train, PROMPTS, rate, rate, is_ahead=True)


def compare(setting: Setting, folder: Path, steps: int) -> dict[str, float]:
    own = measure(setting, folder / "own", steps, lends=False)
    lending = measure(setting, folder / "lending", steps, lends=True)
    figures = {
        "ratio": lending.samples_per_second / own.samples_per_second,
        "bound": possible(own, lending),
        "samples_per_second/own": own.samples_per_second,
        "samples_per_second/lending": lending.samples_per_second,
        "lend/tokens_fraction": lending.tokens_fraction,
        "lend/late_fraction": lending.late / lending.step,
    }
    print(
        f"{setting.name:9} {own.samples_per_second:7.2f} samples/s without, "
        f"{lending.samples_per_second:7.2f} with lending: x {figures['ratio']:.3f}, possible "
        f"x {figures['bound']:.3f}; training {own.train:.2f} s of {own.step:.2f} s; wake {lending.wake:.3f}, "
        f"sleep {lending.sleep:.3f}, room {lending.room:.3f} s; late {figures['lend/late_fraction']:.1%}; lent "
        f"servers wrote {lending.tokens_fraction:.0%}",
        flush=True,
    )
    return figures


def verdict(rounds: dict[str, list[dict[str, float]]]) -> tuple[dict[str, float], bool]:
    parts = [(row["ratio"] - 1) / (row["bound"] - 1) for row in rounds["3:1"]]
    ratios = [row["ratio"] for row in rounds["balanced"]]
    figures = {
        "gain_part": mean(parts),
        "balanced_ratio": mean(ratios),
        "gain_part_spread": stdev(parts) if len(parts) > 1 else 0.0,
        "balanced_spread": stdev(ratios) if len(ratios) > 1 else 0.0,
    }
    checks = (
        (
            mean(parts) >= LEAST_PART,
            f"of the possible gain: {mean(parts):.2f}, at least {LEAST_PART}",
        ),
        (
            mean(ratios) >= 1 - MOST_LOSS,
            f"samples a second of the balanced run with lending, over without: {mean(ratios):.3f}, at least "
            f"{1 - MOST_LOSS}",
        ),
    )
    for holds, text in checks:
        print(f"{'ok  ' if holds else 'FAIL'} {text}")
    return figures, all(holds for holds, _ in checks)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="steps of a run")
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {setting.name: [] for setting in SETTINGS}
    with tempfile.TemporaryDirectory(prefix="lending-") as temporary:
        for number in range(options.rounds):
            for setting in SETTINGS:
                folder = Path(temporary) / f"{setting.name}-{number}"
                rounds[setting.name].append(compare(setting, folder, options.steps))
    figures, holds = verdict(rounds)
    return finish(options, "lending", holds, figures)


if __name__ == "__main__":
    sys.exit(main())
