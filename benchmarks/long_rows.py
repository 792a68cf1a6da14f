# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Simulates whether HelixPipe is faster than other schedules for long rows, with measured times.

    python benchmarks/long_rows.py [--json]

One rank measures the times of matrix products of a 7B model's layer, and of causal attention of a
few of its heads at lengths that a CPU can compute. Two ranks measure the time of their link. Times
at 32k, 64k and 128k tokens are extrapolated by FLOPs: those of attention grow with the square of
the length, and all others in proportion to the length. With these times, the benchmark simulates
HelixPipe (`helix.py`) and the schedules of the package for microbatches of one row. All schedules
recompute everything but attention in the backward pass.

Memory is the peak of the rank that holds most, in tensors of one row's hidden states [tokens,
width]. It includes the activations of forward passes and the factors of pending weight gradients.
HelixPipe keeps four tensors for each layer (the residual stream, and the tensors before and after
attention, which are on other ranks), and the other schedules keep two. The benchmark compares
HelixPipe with the fastest V schedule, and with the fastest schedule of all, that hold no more
memory than HelixPipe does, under any bound of pending weight gradients
(`grpo.max_pending_weight_grads_gib`).

On a CPU, the time of communication is negligible beside that of computation. All tables are
therefore made a second time with a link that is as slow, relative to the products, as that of an
accelerator. In the simulation, tensors do not wait for one another on a link.
"""

import itertools
import math
import sys
from collections import deque
from dataclasses import replace
from typing import Any

from figures import finish, make_parser
from helix import PartTimes, best_helix
from ranks import run_job

from torchtitan.grpo.pipeline.schedules import AUTO, LAYER_SCHEDULES, SCHEDULES
from torchtitan.grpo.pipeline.tables.actions import Action, Costs, StageCosts, Table
from torchtitan.grpo.pipeline.tables.simulate import Simulation, simulate

LAYERS, DIM, FFN, HEAD_DIM = 32, 4096, 11008, 128
TOKENS = (32768, 65536, 131072)
PIPELINES = ((4, 8), (4, 16), (8, 16), (8, 32))
"""Pairs of the number of ranks and the number of microbatches."""
MORE_STAGES = 4
"""Number of stages of a rank in the additional rows of interleaved schedules."""
V_SCHEDULES = ("ZBVZeroBubble", "VMin", "VHalf", "VZB")
MEASURED: dict[str, Any] = {
    "dim": DIM, "ffn": FFN, "head_dim": HEAD_DIM, "linear_tokens": 256, "measured_heads": 2,
    "lengths": [2048, 4096], "link_bytes": 32 * 2**20,
}  # fmt: skip
KEPT = 2
"""Number of hidden-state tensors that a layer keeps for backward passes, except in HelixPipe."""
PENDING_LINEAR, PENDING_QKV = (4 * DIM + 3 * FFN) / DIM, 4.0
PENDING = PENDING_LINEAR + PENDING_QKV
"""Memory of the factors of a layer's weight gradients, which are the inputs and the gradients of
the outputs, in tensors of hidden states."""
ACCELERATOR = {"flops": 4e14, "bandwidth": 5e10}
"""Assumed FLOP/s of an accelerator, and assumed bytes per second of its network."""
WORTH_IT = 1.10
"""Speedup above which it would be worthwhile to implement HelixPipe."""
BYTES = 2
"""Bytes of a number that is sent, in bfloat16. The products are measured in float32."""


def measure() -> dict[str, Any]:
    """Returns the seconds per FLOP and per byte; see `long_rows_run.py`."""
    return run_job(2, "long_rows_run.py", MEASURED, timeout_seconds=300)


def times_at(tokens: int, measured: dict[str, Any]) -> PartTimes:
    """Returns the times for rows of ``tokens`` tokens, extrapolated by FLOPs and bytes."""
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
        linear_pending=PENDING_LINEAR,
        qkv_pending=PENDING_QKV,
    )


def simulate_all(times: PartTimes, ranks: int, microbatches: int) -> dict[str, list[Simulation]]:
    """Simulates the schedules of the package.

    Zero-bubble schedules are simulated with several bounds of pending weight gradients.
    """
    found = {}
    weights = times.linear + times.qkv
    rows = [
        (name, row, row.stages_per_rank) for name, row in LAYER_SCHEDULES.items() if name != AUTO
    ]
    for name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rows.append((f"{name}, {MORE_STAGES} stages", SCHEDULES[name], MORE_STAGES))
    for name, row, per_rank in rows:
        layers = LAYERS / (ranks * per_rank)
        stage = StageCosts(
            layers * (weights + times.attention),
            layers * (2 * weights + times.attention_backward),
            layers * weights,
            activation=layers * KEPT,
            pending=layers * PENDING,
            recompute=weights,  # one block, which is the default of grpo.recompute_early_blocks
        )
        costs = Costs((stage,) * (ranks * per_rank), times.hidden_hop)
        table = row.make_table(ranks, microbatches, costs)
        bounds = (math.inf, 32, 16, 8, 4, 2, 1, 0) if row.is_zero_bubble else (math.inf,)
        found[name] = [
            simulate(with_bound(table, costs, bound * stage.pending), costs) for bound in bounds
        ]
    return found


def with_bound(table: Table, costs: Costs, most: float) -> Table:
    """Returns a table with a bound of the memory of pending weight gradients.

    As in a run, the oldest W is computed as soon as the bound would be exceeded.
    """
    orders = []
    for actions in table.actions:
        order: list[Action] = []
        waiting: deque[Action] = deque()
        for action in actions:
            if action.kind != "W":
                order.append(action)
            elif action in waiting:
                waiting.remove(action)
                order.append(action)
            if action.kind == "I":
                waiting.append(action._replace(kind="W"))
                while waiting and -sum(map(costs.memory, waiting)) > most:
                    order.append(waiting.popleft())
        orders.append(tuple(order))
    return replace(table, actions=tuple(orders))


def compare(
    tokens: int, times: PartTimes, ranks: int, microbatches: int, link: str
) -> dict[str, float]:
    """Prints one table.

    Returns:
        For each row of HelixPipe, the times of the best V schedule and of the best schedule of all,
        relative to the time of HelixPipe.
    """
    weights = times.linear + times.qkv
    busy = LAYERS * microbatches / ranks
    busy *= 4 * weights + times.attention + times.attention_backward
    print(f"\n{tokens // 1024}k tokens, {ranks} ranks, {microbatches} microbatches, {link} link")
    print(f"{'':40} {'time / busy time':>17} {'memory':>7}")
    gains = {}
    others = simulate_all(times, ranks, microbatches)
    # HelixPipe holds the microbatches of one loop, as in the paper, or all microbatches.
    for held, defers in itertools.product(sorted({2 * ranks, microbatches}), (False, True)):
        helix = best_helix(times, ranks, LAYERS, microbatches, held, defers=defers)
        label = f"{held} held{', W deferred' if defers else ''}"
        print(
            f"{f'HelixPipe, {label}':40} {helix.makespan / busy:17.3f} {helix.peak:7.0f}   the "
            f"busiest link sends for {helix.sent / helix.makespan:.1%} of the time; within this "
            "memory:",
            end="",
        )
        for which, names in (("v", V_SCHEDULES), ("any", tuple(others))):
            best, name = min(
                (s.makespan, name)
                for name in names
                for s in others[name]
                if s.peak <= helix.peak + 1e-9
            )
            print(f" {name} takes {best / helix.makespan:.3f} of HelixPipe's time;", end="")
            key = f"{tokens}_p{ranks}_m{microbatches}_{label}_{link}_{which}"
            gains[key.replace(", ", "_").replace(" ", "_")] = best / helix.makespan
        print()
    for name, found in others.items():
        cells = f"{found[0].makespan / busy:17.3f} {found[0].peak:7.0f}"
        if len(found) > 1:
            least = found[-1]
            cells += (
                f"   without pending weight gradients: {least.makespan / busy:.3f} {least.peak:.0f}"
            )
        print(f"{name:40} {cells}")
    return gains


def main() -> int:
    """Returns the exit status."""
    parser = make_parser(__doc__)
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
            f"\n{tokens // 1024}k tokens: relative to the time of a layer's products, attention "
            f"takes {times.attention / weights:.2f}, and sending a tensor of hidden states takes "
            f"{times.hidden_hop / weights:.3f}"
        )
        # A hop then takes the same share of the time of a layer's products as on the accelerator.
        slower = (
            ACCELERATOR["flops"]
            * measured["linear"]
            / (ACCELERATOR["bandwidth"] * measured["link"])
        )
        assumed = replace(
            times, hidden_hop=slower * times.hidden_hop, weights_hop=slower * times.weights_hop
        )
        for ranks, microbatches in PIPELINES:
            for link, its in (("measured", times), ("assumed", assumed)):
                gains |= compare(tokens, its, ranks, microbatches, link)
    print("\nTime of the best schedule within HelixPipe's memory, relative to HelixPipe's time:")
    for link, which in itertools.product(("measured", "assumed"), ("v", "any")):
        for per_rank in (2, 4):
            of_kind = [
                gain
                for key, gain in gains.items()
                if key.endswith(f"{link}_{which}")
                and any(f"p{p}_m{m}_" in key for p, m in PIPELINES if m == per_rank * p)
            ]
            print(
                f"  {link} link, {per_rank} microbatches per rank, best {which} schedule: "
                f"{min(of_kind):.3f} to {max(of_kind):.3f}; at least {WORTH_IT} in "
                f"{sum(gain >= WORTH_IT for gain in of_kind)} of {len(of_kind)} cases"
            )
    forward, backward = measured["attention"]["4096"]
    figures = gains | {"attention_backward_over_forward": backward / forward}
    return finish(given, "long_rows", True, figures)


if __name__ == "__main__":
    sys.exit(main())
