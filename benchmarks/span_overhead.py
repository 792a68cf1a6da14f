# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures what ``observe.timeline`` costs: nanoseconds of a span, and the time of training steps.

    python benchmarks/span_overhead.py [--json]

The real trainer learns recorded batches with two models of random weights: a tiny one, and one of about
SmolLM2-135M's size. Spans are on and off in turns, a block of steps each, in one process; besides what the
trainer records itself, each step records 100 spans, as the rank of a pipeline does. The figure is the median
over pairs of blocks of the time of the steps with spans, divided by that of those without. Where other programs
run beside it, only the ratio of the processor times says something: it must be at most 1.02.
It takes up to five minutes on two CPU cores.
"""

import statistics
import tempfile
import timeit
from pathlib import Path

from figures import finish, make_parser, say_bounds
from layout_parity import record_batch
from random_models import VOCAB_SIZE, make_model
from ranks import run_job

from torchtitan.grpo.system import spans

_MOST = 1.02
_ROUNDS, _CALLS = 7, 20_000
# Model, steps of a block, and pairs of blocks.
_RUNS = (("0.1M", 2, 100), ("106M", 1, 8))


def nanoseconds_of_add(folder: Path, *, is_on: bool) -> float:
    if is_on:
        spans.open_spans(folder, "benchmark")
    times = timeit.repeat(
        lambda: spans.add("pipeline", "F", 1.0, 2.0, stage=0, microbatch=3),
        repeat=_ROUNDS,
        number=_CALLS,
    )
    spans.close_spans()
    return 1e9 * statistics.median(times) / _CALLS


def timed_steps(folder: Path, size: str, block: int, pairs: int) -> list[tuple[float, float]]:
    """Runs the steps; returns the time and the processor time of each."""
    model, _ = make_model(folder, size)
    num_steps = block * 2 * (pairs + 1)  # the first pair warms up
    record_batch(folder / f"{size}.record", num_steps, vocab_size=VOCAB_SIZE)
    settings = {
        "job.dump_folder": folder / f"dump-{size}", "model.hf_assets_path": model,
        "training.steps": num_steps, "training.seq_len": 64, "training.local_batch_size": 4,
        "training.mixed_precision_param": "float32", "optimizer.implementation": "foreach",
        "activation_checkpoint.mode": "none", "rollout.replay": folder / f"{size}.record",
        "rollout.max_new_tokens": 48, "grpo.prompts_per_step": 6, "grpo.group_size": 4,
        "observe.progress": "none", "observe.log_level": "warning", "observe.monitor": False,
        "observe.samples_per_step": 0, "debug.seed": 0,
    }  # fmt: skip
    args = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    job = {"args": args, "block": block}
    return run_job(1, "span_overhead_run.py", job, timeout_seconds=240)


def step_ratio(seconds: list[float], block: int) -> tuple[float, float]:
    """Returns the median seconds of a step without spans, and the median ratio."""
    # The first two blocks warm up.
    blocks = [sum(seconds[i : i + block]) for i in range(2 * block, len(seconds), block)]
    ratios, off = [], []
    for number, (first, second) in enumerate(zip(blocks[::2], blocks[1::2], strict=True), 1):
        # Blocks are on, off, off, on, and so on.
        without, with_spans = (second, first) if number % 2 else (first, second)
        ratios.append(with_spans / without)
        off.append(without / block)
    return statistics.median(off), statistics.median(ratios)


def main() -> int:
    given = make_parser(__doc__).parse_args()
    figures: dict[str, float] = {}
    missed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for mode, is_on in (("off", False), ("on", True)):
            figures[f"add_{mode}_ns"] = nanoseconds_of_add(folder, is_on=is_on)
            print(f"add(), {mode}: {figures[f'add_{mode}_ns']:.0f} ns", flush=True)
        for size, block, pairs in _RUNS:
            steps = timed_steps(folder, size, block, pairs)
            for index, what in enumerate(("time", "processor time")):
                seconds, ratio = step_ratio([each[index] for each in steps], block)
                key = what.replace(" ", "_")
                figures |= {f"{size}_{key}_seconds": seconds, f"{size}_{key}_ratio": ratio}
                print(
                    f"{size}, {what}: {seconds:.4f} s a step, times {ratio:.4f} with spans",
                    flush=True,
                )
            if ratio > _MOST:
                missed.append(f"{size}: {ratio:.4f} > {_MOST}")
    return finish(given, "span_overhead", say_bounds(missed), figures)


if __name__ == "__main__":
    raise SystemExit(main())
