# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures what asynchronous training gains, compared with the best possible gain.

    python benchmarks/async_throughput.py [--json] [--steps 16] [--batches 12] [--keep FOLDER]
                                          [--decoding timed computed]

The benchmark runs the whole loop on a fixed amount of work: one training rank, embedded servers,
a Qwen3 of a few million parameters, and completions of a fixed length. Synchronous training
(`rollout.max_head_offpolicyness = 0`) waits for generation and then trains. Its steps show how
long generation and training take, and therefore the best gain that any overlap could give:
``(generate + train) / max(generate, train)``. The same run follows with a bound of 1, 2 and 4
versions. The figures are medians over the steps without the first ones. Completions are
generated in two ways:

    timed      by two servers whose decode step sleeps for a fixed time (`stub_server.py`). They
               stand for servers on hardware of their own; everything else is real.
    computed   by one server that decodes with the model on the cores that training also uses.
               Before that, the benchmark measures how much two cores compute at once compared
               with one core alone. If that is less than 2, no overlap of two computations can
               be ideal.

Then the run with timed servers and a bound of 2 is repeated with an evaluation after every step,
whose completions the same servers generate. An evaluation must not make step boundaries slower, so
the benchmark compares the medians of `time/boundary_stall_seconds` of the runs with and without
evaluations.

The last part is `dispatch_tail.py`: batches with a heavy-tailed distribution of lengths, longest
first against first come, first served. The benchmark takes about six minutes on two cores. The
exit status is 1 if a gain with timed servers is less than 0.85 of the ideal gain, if the stall of a
boundary with evaluations is more than 1.5 times that without and 0.5 ms more, or if longest first
takes more than 0.85 of the time of first come, first served. With ``--json`` the last line is a
JSON object.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from dispatch_tail import measure_tail
from figures import finish, make_parser
from random_models import make_model
from stub_servers import running_stubs

REPOSITORY = Path(__file__).resolve().parents[1]
DECODING = ("timed", "computed")
BOUNDS = (1, 2, 4)
SHARE_OF_IDEAL = 0.85
SIZE = "5M"
PROMPTS_PER_STEP, GROUP_SIZE = 2, 8
SEQ_LEN, NEW_TOKENS = 256, 240
NUM_TIMED_SERVERS, DECODE_SECONDS = 2, 0.006
WARM_UP_STEPS = 4
EVALUATION = (
    f"--evaluation.path={REPOSITORY / 'assets/reverse_digits/heldout.jsonl'}",
    *("--evaluation.interval=1", "--evaluation.num_prompts=4", "--evaluation.max_new_tokens=60"),
)
MOST_STALL, MOST_STALL_SECONDS = 1.5, 0.0005
RUN_SECONDS = 900.0
MULTIPLY = """
import time, torch
torch.set_num_threads(1)
a = torch.randn(384, 384)
begin, count = time.perf_counter(), 0
while time.perf_counter() - begin < 3:
    torch.mm(a, a)
    count += 1
print(count)
"""


def cores_at_once() -> float:
    """Returns the throughput of two busy cores relative to that of one; 2 if they share nothing."""

    def rate(num_processes: int) -> int:
        command = [sys.executable, "-c", MULTIPLY]
        started = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            for _ in range(num_processes)
        ]
        return sum(int(process.communicate(timeout=60)[0]) for process in started)

    return rate(2) / rate(1)


@contextmanager
def servers_of(decoding: str, model: Path, folder: Path) -> Iterator[list[str]]:
    """Yields the arguments that name the servers of a run."""
    if decoding == "computed":
        yield ["--inference.launch"]
        return
    with running_stubs(
        NUM_TIMED_SERVERS,
        model,
        folder,
        decode_seconds=DECODE_SECONDS,
        mean_tokens=NEW_TOKENS,
        max_model_len=SEQ_LEN,
        max_running_requests=PROMPTS_PER_STEP * GROUP_SIZE,
    ) as servers:
        yield [f"--inference.urls={','.join(server.url for server in servers)}"]


def run(
    model: Path, folder: Path, servers: list[str], staleness: int, steps: int
) -> list[dict[str, Any]]:
    """Trains and returns the metrics of each step."""
    settings = {
        "job.dump_folder": folder,
        "model.hf_assets_path": model,
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": 4,
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
        "prompts.max_prompt_tokens": 16,
        "rollout.max_head_offpolicyness": staleness,
        "rollout.max_new_tokens": NEW_TOKENS,
        "rollout.max_concurrent_rollouts": PROMPTS_PER_STEP * GROUP_SIZE,
        "inference.kind": "embedded",
        "inference.dtype": "float32",
        "reward.functions": "exact_match",
        "observe.progress": "none",
        "observe.samples_per_step": 0,
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"),
        *("-m", "torchtitan.grpo_train", "--rollout.ignore_eos", *servers),
        *(token for key, value in settings.items() for token in (f"--{key}", str(value))),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    if done.returncode != 0:
        raise SystemExit(f"The run failed:\n{done.stdout[-3000:]}\n{done.stderr[-9000:]}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][WARM_UP_STEPS:]


def median(records: list[dict[str, Any]], key: str) -> float:
    return float(np.median([record[key] for record in records]))


def measure(decoding: str, model: Path, folder: Path, steps: int) -> tuple[dict[str, float], bool]:
    """Runs training with each staleness bound and prints a line for each.

    Returns:
        The figures, and whether each gain reaches the required share of the ideal.
    """
    folder.mkdir()
    with servers_of(decoding, model, folder) as servers:
        synchronous = run(model, folder / "bound-0", servers, 0, steps)
    step = median(synchronous, "time/step_seconds")
    generate = median(synchronous, "time/wait_data_seconds")
    train = step - generate
    ideal = step / max(generate, train)
    num_samples = PROMPTS_PER_STEP * GROUP_SIZE
    figures = {
        "generate_seconds": generate,
        "train_seconds": train,
        "ideal_gain": ideal,
        "bound0/samples_per_second": num_samples / step,
    }
    print(
        f"{decoding}: synchronous {num_samples / step:6.2f} samples/s; a step generates for "
        f"{generate:.3f} s and trains for {train:.3f} s, so the ideal gain is x{ideal:.2f}",
        flush=True,
    )
    holds = True
    for bound in BOUNDS:
        # Each run starts at version 0 again, so it needs servers of its own.
        with servers_of(decoding, model, folder) as servers:
            records = run(model, folder / f"bound-{bound}", servers, bound, steps)
        gain = step / median(records, "time/step_seconds")
        figures |= {
            f"bound{bound}/samples_per_second": gain * num_samples / step,
            f"bound{bound}/gain": gain,
            f"bound{bound}/share_of_ideal": gain / ideal,
            f"bound{bound}/staleness_mean": median(records, "staleness/mean_steps"),
        }
        holds = holds and gain / ideal >= SHARE_OF_IDEAL
        print(
            f"{decoding}: bound {bound}     {gain * num_samples / step:6.2f} samples/s, x{gain:.2f}, "
            f"{gain / ideal:.2f} of the ideal; mean staleness "
            f"{figures[f'bound{bound}/staleness_mean']:.2f} steps, wait for data "
            f"{median(records, 'time/wait_data_seconds'):.3f} s per step",
            flush=True,
        )
    return figures, holds


def measure_evaluation(model: Path, folder: Path, steps: int) -> tuple[dict[str, float], bool]:
    """Compares the step boundaries of a run with evaluations to those of a run without.

    Returns:
        The figures, and whether the stall with evaluations is within its bound.
    """
    stalls, step_seconds, num_evaluations = {}, {}, 0
    for name, more in (("without", ()), ("with", EVALUATION)):
        with servers_of("timed", model, folder) as servers:
            records = run(model, folder / f"evaluation-{name}", [*servers, *more], 2, steps)
        stalls[name] = median(records, "time/boundary_stall_seconds")
        step_seconds[name] = median(records, "time/step_seconds")
        file = folder / f"evaluation-{name}" / "evaluations.jsonl"
        num_evaluations = len(file.read_text().splitlines())
    ratio = stalls["with"] / stalls["without"]
    holds = stalls["with"] <= max(
        MOST_STALL * stalls["without"], stalls["without"] + MOST_STALL_SECONDS
    )
    print(
        f"timed: the median stall of a boundary is {1e3 * stalls['with']:.3f} ms with "
        f"{num_evaluations} evaluations and {1e3 * stalls['without']:.3f} ms without "
        f"(x{ratio:.2f}); a step takes {step_seconds['with']:.3f} s and "
        f"{step_seconds['without']:.3f} s",
        flush=True,
    )
    figures = {
        "boundary_stall_ratio": ratio,
        "boundary_stall_seconds": stalls["with"],
        "step_ratio": step_seconds["with"] / step_seconds["without"],
        "num_evaluations": float(num_evaluations),
    }
    return figures, holds


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--steps",
        type=int,
        default=16,
        help=f"steps of a run; the first {WARM_UP_STEPS} are not counted",
    )
    parser.add_argument("--batches", type=int, default=12, help="batches of heavy-tailed lengths")
    parser.add_argument(
        "--decoding", nargs="*", choices=DECODING, default=list(DECODING), help="kinds of servers"
    )
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="async-throughput-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model, _ = make_model(folder, SIZE)
        figures: dict[str, float] = {"cores_at_once": cores_at_once()}
        print(f"two cores compute {figures['cores_at_once']:.2f} times as much as one core alone")
        holds = True
        for decoding in options.decoding:
            found, is_near = measure(decoding, model, folder / decoding, options.steps)
            figures |= {f"{decoding}/{name}": value for name, value in found.items()}
            holds = holds and (is_near or decoding == "computed")
        if "timed" in options.decoding:
            found, is_alike = measure_evaluation(model, folder / "timed", options.steps)
            figures |= {f"evaluation/{name}": value for name, value in found.items()}
            holds = holds and is_alike
        print(
            f"{'ok  ' if holds else 'FAIL'} with timed servers, each bound must reach "
            f"{SHARE_OF_IDEAL} of the ideal gain, and evaluations must not delay step boundaries"
        )
    tail, is_faster = measure_tail(options.batches, taught=400, seed=0)
    figures |= {f"tail/{name}": value for name, value in tail.items()}
    holds = holds and is_faster
    return finish(options, "async_throughput", holds, figures)


if __name__ == "__main__":
    sys.exit(main())
