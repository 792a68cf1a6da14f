# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures the load of a thousand completions in flight on the rollout process and the trainer.

    python benchmarks/rollout_load.py [--json] [--steps 1200] [--keep FOLDER]

The real trainer (one rank) and its rollout process keep 1,000 completions in flight, scored by
`exact_match`, on two embedded servers whose model computes nothing (`stub_server.py`). The weights
of every step are pushed to both. Training has the first core that this process may use; the
rollout process, the reward worker and the servers share the second.

There are two runs. The first run measures the delay of the rollout process's event loop with the
process's own metric (`rollout/loop_lag_p99_ms`, over the last minute). In the second run the
rollout process and the reward worker are stopped during the trainer's computation in every second
step, drawn at random (SIGSTOP, `rollout_load_run.py`). The steps of one run thus show by how much
the rollout process slows the trainer down. Differences between runs and between minutes, which are
larger, affect both kinds of steps equally. All steps compute the same shape.

The benchmark takes about ten minutes. The exit status is 1 if the 99th percentile of the delay is
not below 50 ms, if a step is on average (without the fastest and the slowest tenth) more than 2 %
slower than a step of the trainer alone, or if fewer than 990 completions were in flight. With
``--json`` the last line is a JSON object.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from figures import finish, make_parser
from random_models import make_model
from stub_servers import running_stubs

from torchtitan.grpo.system.child import start_child, stop_children

REPOSITORY = Path(__file__).resolve().parents[1]
STOPPING_TRAINER = REPOSITORY / "benchmarks/rollout_load_run.py"
SIZE = "0.1M"
LAG_BOUND_MS = 50.0
CHANGE_BOUND = 0.02
LEAST_IN_FLIGHT = 990
NUM_SERVERS = 2
IN_FLIGHT = 1000
# Duration of a server's step. It is so long that the trainer has to wait for data; otherwise the
# servers would sometimes be idle.
DECODE_SECONDS = 0.04
# All rewards are equal, so that dynamic sampling drops as many groups as it may: one for each group
# that is trained on.
DISCARDED = 1.0
PROMPTS_PER_STEP, GROUP_SIZE = 1, 8
SEQ_LEN, NEW_TOKENS, MEAN_TOKENS = 512, 480, 256
# There are so many rows of SEQ_LEN that the samples of a step always fit into one microbatch of one
# shape.
ROWS = 8
# Maximum number of versions that are trained while a completion is generated.
STALENESS = 400
WARM_UP_STEPS = 60
RUN_SECONDS = 1200.0


# -- cores ----------------------------------------------------------------------------


def children_of(pid: int) -> list[int]:
    """Returns all descendants of a process."""
    found = []
    with suppress(OSError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found + [other for child in found for other in children_of(child)]


def is_trainer(pid: int) -> bool:
    """Returns whether a descendant of torchrun is a training rank."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"torchtitan.grpo_train" in words or os.fsencode(STOPPING_TRAINER) in words
    return False


def pin(pid: int, core: int) -> None:
    """Binds all threads of a process to one core."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})


def pin_run(torchrun: int, cores: Sequence[int]) -> None:
    """Binds the trainer to the first core and all other descendants of torchrun to the second."""
    for pid in children_of(torchrun):
        pin(pid, cores[0] if is_trainer(pid) else cores[1])


# -- one run --------------------------------------------------------------------------


def settings(urls: list[str], steps: int) -> dict[str, Any]:
    return {
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": ROWS,
        "training.mixed_precision_param": "float32",
        "training.steps": steps,
        "optimizer.implementation": "foreach",
        "optimizer.lr": 1e-5,
        "lr_scheduler.warmup_steps": 0,
        "optimizer.beta2": 0.95,
        "optimizer.weight_decay": 0.1,
        "lr_scheduler.decay_ratio": 1.0,
        "activation_checkpoint.mode": "none",
        "debug.seed": 0,
        "grpo.group_size": GROUP_SIZE,
        "grpo.prompts_per_step": PROMPTS_PER_STEP,
        "prompts.path": REPOSITORY / "assets/reverse_digits/train.jsonl",
        "rollout.max_head_offpolicyness": STALENESS,
        "rollout.max_new_tokens": NEW_TOKENS,
        "rollout.max_concurrent_rollouts": IN_FLIGHT,
        # Finished groups never delay new ones.
        "rollout.buffer_size_limit": 1000 * GROUP_SIZE,
        "inference.kind": "embedded",
        "inference.urls": ",".join(urls),
        "weight_sync.transport": "host",
        "reward.functions": "exact_match",
        "observe.progress": "none",
        "observe.samples_per_step": 0,
    }


def run(
    model: Path, folder: Path, steps: int, cores: Sequence[int], program: Sequence[str]
) -> list[dict[str, Any]]:
    """Trains with the given program; returns the metrics of the steps after the warm-up."""
    folder.mkdir(parents=True)
    with running_stubs(
        NUM_SERVERS,
        model,
        folder,
        decode_seconds=DECODE_SECONDS,
        mean_tokens=MEAN_TOKENS,
        max_model_len=SEQ_LEN,
        # A server has room for all completions; the dispatcher decides how many it gets.
        max_running_requests=1024,
        attend=lambda pid: pin(pid, cores[1]),
    ) as servers:
        urls = [server.url for server in servers]
        folders = {"job.dump_folder": folder, "model.hf_assets_path": model}
        arguments = (folders | settings(urls, steps)).items()
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "1", *program, "--rollout.dynamic_sampling"),
            *("--rollout.dynamic_sampling_limit", str(DISCARDED)),
            *(token for key, value in arguments for token in (f"--{key}", str(value))),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
            # Freed memory is kept; otherwise allocation would dominate the step time.
            "MALLOC_MMAP_THRESHOLD_": str(2**31), "MALLOC_TRIM_THRESHOLD_": str(2**34),
        }  # fmt: skip
        log_file = folder / "trainer.log"
        trainer = start_child(command, env=environment, log_file=log_file)
        try:
            deadline = time.monotonic() + RUN_SECONDS
            while trainer.poll() is None and time.monotonic() < deadline:
                pin_run(trainer.pid, cores)
                with suppress(subprocess.TimeoutExpired):
                    trainer.wait(timeout=1.0)
        finally:
            stop_children([trainer], grace_seconds=20.0)
    if trainer.returncode != 0:
        raise SystemExit(f"A run failed; the end of {log_file}:\n{log_file.read_text()[-9000:]}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][WARM_UP_STEPS:]


# -- figures --------------------------------------------------------------------------


def column(records: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([record[key] for record in records])


def load_figures(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the throughput of a run and the delays of the event loop."""
    seconds = column(records, "time/step_seconds")
    tokens = column(records, "rollout/tokens_per_second") * seconds
    trained = len(records) * PROMPTS_PER_STEP * GROUP_SIZE
    return {
        "tokens_per_second": float(tokens.sum() / seconds.sum()),
        "trained_per_second": trained / float(seconds.sum()),
        "in_flight_p5": float(np.percentile(column(records, "rollout/inflight_rollouts"), 5)),
        "lag_p50_ms": records[-1]["rollout/loop_lag_p50_ms"],
        "lag_p99_ms": records[-1]["rollout/loop_lag_p99_ms"],
        "lag_max_ms": float(column(records, "rollout/loop_lag_max_ms").max()),
    }


def cost_figures(steps: Sequence[tuple[bool, float]]) -> dict[str, float]:
    """Returns by how much the other processes slow the trainer's steps down.

    Means leave out the fastest and the slowest tenth. The interval is the 95 % bootstrap interval.

    Args:
        steps: For each step, whether the trainer ran alone, and the seconds of the step.
    """
    alone = 1e3 * np.array([seconds for is_alone, seconds in steps if is_alone])
    beside = 1e3 * np.array([seconds for is_alone, seconds in steps if not is_alone])
    random = np.random.default_rng(0)
    drawn = [
        middle_mean(some[random.integers(len(some), size=(2000, len(some)))])
        for some in (alone, beside)
    ]
    low, high = np.percentile(drawn[1] / drawn[0] - 1, [2.5, 97.5])
    return {
        "steps_alone": float(len(alone)),
        "steps_beside": float(len(beside)),
        "alone_ms": float(middle_mean(alone)),
        "beside_ms": float(middle_mean(beside)),
        "change": float(middle_mean(beside) / middle_mean(alone) - 1),
        "change_low": float(low),
        "change_high": float(high),
    }


def middle_mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean along the last axis without the lowest and the highest tenth."""
    ordered = np.sort(values, axis=-1)
    cut = ordered.shape[-1] // 10
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


def measure(folder: Path, steps: int) -> tuple[dict[str, float], bool]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit(
            f"This process must be allowed to use two cores, one of them for training, got {cores}."
        )
    model, _ = make_model(folder, SIZE)
    lag_steps = max(steps // 4, WARM_UP_STEPS + 1)
    records = run(model, folder / "lag", lag_steps, cores, ("-m", "torchtitan.grpo_train"))
    load = load_figures(records)
    print(
        f"{load['tokens_per_second']:.0f} tokens/s, {load['trained_per_second']:.1f} trained "
        f"completions/s; delay of the event loop: p50 {load['lag_p50_ms']:.2f}, p99 "
        f"{load['lag_p99_ms']:.1f}, maximum {load['lag_max_ms']:.1f} ms",
        flush=True,
    )
    out = folder / "steps.json"
    program = (str(STOPPING_TRAINER), str(out), str(WARM_UP_STEPS))
    run(model, folder / "cost", steps, cores, program)
    cost = cost_figures(json.loads(out.read_text())[WARM_UP_STEPS:])
    print(
        f"The trainer computes a step in {cost['alone_ms']:.2f} ms alone "
        f"({cost['steps_alone']:.0f} steps) and in {cost['beside_ms']:.2f} ms beside the rollout "
        f"process: {cost['change']:+.2%} (95 % interval: {cost['change_low']:+.2%} to "
        f"{cost['change_high']:+.2%})"
    )
    bounds = {
        f"event-loop delay p99: {load['lag_p99_ms']:.1f} ms, must be < {LAG_BOUND_MS:g} ms": (
            load["lag_p99_ms"] < LAG_BOUND_MS
        ),
        f"change of the step time: {cost['change']:+.2%}, must be <= {CHANGE_BOUND:.0%}": (
            cost["change"] <= CHANGE_BOUND
        ),
        f"completions in flight in 95 % of the steps: {load['in_flight_p5']:.0f}, must be >= "
        f"{LEAST_IN_FLIGHT}": (load["in_flight_p5"] >= LEAST_IN_FLIGHT),
    }
    for text, holds in bounds.items():
        print("ok  " if holds else "FAIL", text)
    return load | cost, all(bounds.values())


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--steps",
        type=int,
        default=1200,
        help=f"steps of a run; the first {WARM_UP_STEPS} are not counted",
    )
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollout-load-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures, holds = measure(folder, options.steps)
    return finish(options, "rollout_load", holds, figures)


if __name__ == "__main__":
    sys.exit(main())
