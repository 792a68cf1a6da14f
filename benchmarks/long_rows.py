# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Asks on paper whether HelixPipe pays for long rows, with the times of this machine.

    python benchmarks/long_rows.py [--json]

One rank times matrix products of a 7B model's layer and causal attention of a few of its heads at
lengths that a CPU can compute, and two ranks time their link. Times at 32k, 64k and 128k tokens are
extrapolated by FLOPs: those of attention grow with the square of the length, all others with the length.
All schedules then recompute everything but attention in the backward pass, and are simulated
with these times for one row a microbatch: HelixPipe (`helix.py`), without communication and with
that of this machine, and the schedules of the package with the latter.

Memory is what forward passes leave plus the factors of weight gradients that wait, at the peak of the
rank that holds most, in hidden states of one row [tokens, width]. HelixPipe keeps four of them for each
layer (the residual stream and what is before and after attention, which lie on other ranks), the others
two. HelixPipe is compared with the fastest V schedule that holds no more than it does.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from helix import PartTimes, best_helix
from ranks import run_ranks

from torchtitan.grpo.pipeline.schedules import AUTO, SCHEDULES
from torchtitan.grpo.pipeline.simulate import Simulation, simulate
from torchtitan.grpo.pipeline.tables.costs import Costs, StageCosts

LAYERS, DIM, FFN, HEAD_DIM = 32, 4096, 11008, 128
TOKENS = (32768, 65536, 131072)
PIPELINES = ((4, 8), (4, 16), (8, 16), (8, 32))
"""Ranks and microbatches."""
V_SCHEDULES = ("ZBVZeroBubble", "VMin", "VHalf", "VZB")
MEASURED: dict[str, Any] = {
    "dim": DIM, "ffn": FFN, "head_dim": HEAD_DIM, "linear_tokens": 256, "measured_heads": 2,
    "lengths": [2048, 4096], "link_bytes": 32 * 2**20,
}  # fmt: skip
KEPT_BY_HELIX, KEPT = 4, 2
"""Hidden states that a layer keeps for the backward pass."""
PENDING = (4 * DIM + 4 * DIM + 3 * FFN) / DIM
"""Hidden states that the factors of a layer's weight gradients take: inputs and outputs' gradients."""
WORTH_IT = 1.10
"""By which HelixPipe would have to be faster to be worth a runtime."""
BYTES = 2
"""Of a number, in bfloat16. The time of a product is measured in float32, as the link's is in bytes."""


def measure() -> dict[str, Any]:
    """Returns seconds per FLOP and per byte; see `long_rows_run.py`."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result.json")
        job.write_text(json.dumps(MEASURED))
        run_ranks(2, "long_rows_run.py", job, result, timeout_seconds=300)
        return json.loads(result.read_text())


def times_at(tokens: int, measured: dict[str, Any]) -> PartTimes:
    """Extrapolates to rows of so many tokens."""
    forward, backward = measured["attention"][str(max(MEASURED["lengths"]))]
    attention_flops = 2 * tokens**2 * DIM
    linear = 2 * tokens * measured["linear"]
    return PartTimes(
        linear=linear * (DIM * DIM + 3 * DIM * FFN),
        qkv=linear * 3 * DIM * DIM,
        attention=attention_flops * forward,
        attention_backward=attention_flops * backward,
        hidden_hop=BYTES * tokens * DIM * measured["link"],
        weights_hop=BYTES * 3 * DIM * DIM * measured["link"],
    )


def simulate_all(times: PartTimes, ranks: int, microbatches: int) -> dict[str, Simulation]:
    """Simulates the schedules of the package."""
    found = {}
    weights = times.linear + times.qkv
    for name, row in SCHEDULES.items():
        if name == AUTO:
            continue
        layers = LAYERS / (ranks * row.stages_per_rank)
        stage = StageCosts(
            layers * (weights + times.attention),
            layers * (2 * weights + times.attention_backward),
            layers * weights,
            activation=layers * KEPT,
            pending=layers * PENDING,
        )
        costs = Costs((stage,) * (ranks * row.stages_per_rank), times.hidden_hop)
        table = row.make_table(ranks, microbatches, row.stages_per_rank, costs)
        found[name] = simulate(table, costs)
    return found


def compare(tokens: int, times: PartTimes, ranks: int, microbatches: int) -> dict[str, float]:
    """Prints one table; returns by how much the best V schedule is slower than HelixPipe."""
    busy = LAYERS * microbatches / ranks
    weights = times.linear + times.qkv
    busy *= 4 * weights + times.attention + times.attention_backward
    free = replace(times, hidden_hop=0.0, weights_hop=0.0)
    print(f"\n{tokens // 1024}k tokens, {ranks} ranks, {microbatches} microbatches")
    print(f"{'':34} {'time / busy time':>17} {'memory':>8}")
    gains = {}
    others = simulate_all(times, ranks, microbatches)
    # One loop at a time, which is the paper's, and all microbatches at once.
    for held in sorted({2 * ranks, microbatches}):
        memory = held * LAYERS / ranks * KEPT_BY_HELIX
        fitting = [s.makespan for name, s in others.items() if name in V_SCHEDULES and s.peak <= memory]
        for label, its in (("no communication", free), ("measured link", times)):
            helix = best_helix(its, ranks, LAYERS, microbatches, held)
            print(
                f"{f'HelixPipe, {held} held, {label}':34} {helix.makespan / busy:17.3f} {memory:8.0f}"
                f"   its links send for {helix.sent / helix.makespan:.0%} of the time"
            )
            if fitting:
                key = f"{tokens}_p{ranks}_m{microbatches}_held{held}_{label.replace(' ', '_')}"
                gains[key] = min(fitting) / helix.makespan
    for name, found in others.items():
        print(f"{name:34} {found.makespan / busy:17.3f} {found.peak:8.0f}")
    for key, gain in gains.items():
        print(f"  {key}: the best V schedule within its memory takes {gain:.3f} of HelixPipe's time")
    return gains


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    given = parser.parse_args()
    measured = measure()
    print(f"Products: {1e-9 / measured['linear']:.1f} GFLOP/s", end="")
    for length, (forward, backward) in measured["attention"].items():
        print(
            f"; attention at {length} tokens: {1e-9 / forward:.1f} GFLOP/s, backward "
            f"{backward / forward:.2f} times as long", end="",
        )  # fmt: skip
    print(f"; link: {1e-9 / measured['link']:.2f} GB/s")
    gains: dict[str, float] = {}
    for tokens in TOKENS:
        times = times_at(tokens, measured)
        weights = times.linear + times.qkv
        print(
            f"\n{tokens // 1024}k tokens: attention takes {times.attention / weights:.2f} of the time "
            f"of a layer's products; a hidden state travels for {times.hidden_hop / weights:.3f} of it"
        )
        for ranks, microbatches in PIPELINES:
            gains |= compare(tokens, times, ranks, microbatches)
    with_link = [gain for key, gain in gains.items() if key.endswith("link")]
    print(
        f"\nThe best V schedule takes {min(gains.values()):.3f} to {max(gains.values()):.3f} of HelixPipe's "
        f"time, {min(with_link):.3f} to {max(with_link):.3f} with communication; a runtime would be worth it "
        f"from {WORTH_IT} on"
    )
    if given.json:
        print(json.dumps({"benchmark": "long_rows", "ok": True, "figures": gains | {
            "attention_backward_over_forward": measured["attention"]["4096"][1] / measured["attention"]["4096"][0],
        }}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
