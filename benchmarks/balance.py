# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures how evenly a batch is spread over ranks, how much padding remains, and the time taken.

    python benchmarks/balance.py [--json] [--cost flops tokens] [--seeds N]

The benchmark applies the planner's own functions to traces of sequence lengths, with rows of
8,192 tokens. For each trace, number of ranks and number of sequences it prints:

- max/mean: the cost of the costliest rank over the mean cost, for round robin, for the bucket sort
  (in the order of length, back and forth over the ranks), for `partition`, and for the spread
  over ranks and rows that training uses (`spread`). No split can be below ``bound``
  (`lower_bound`), and no split into rows of 8,192 with the fewest possible rows can be below
  ``in rows``.
- padding: for best-fit decreasing with rows dealt out in snake order (``bfd``) and for `spread`.
  ``floor`` is the padding of the fewest rows that can hold the sequences, with the same number on
  each rank.
- milliseconds of `partition` and of `spread`, as medians.

The exit status is 1 unless all of this holds:

1. `partition` has max/mean <= 1.02 wherever ``bound`` is at most 1.02. (In the other cases, one
   long sequence, or several that must share a rank, exceed the mean.) `spread` has max/mean <= 1.02
   wherever ``in rows`` is at most 1.02. (In the other cases, rows may also be so full that a rank
   with a long sequence must take as many other tokens as the other ranks.) In no case are they more
   than 1.02 times these bounds.
2. Padding is at most 3 % wherever ``floor`` is at most 3 %. (In the other cases, a rank has so few
   rows that the last row, which every rank must have, is more than 3 % of them.)
3. `partition` of 4,096 sequences over 64 ranks takes at most 100 ms.

With ``--json`` the last line is a JSON object.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from figures import finish, make_parser

from torchtitan.grpo.data.balance import lower_bound, lower_bound_with_sizes, partition
from torchtitan.grpo.data.cost import SequenceCost, flops_cost, token_cost
from torchtitan.grpo.data.packing import fewest_rows, rows_per_rank
from torchtitan.grpo.data.spread import Spread, rank_costs, spread_by_cost, spread_by_rows

ROW_LEN = 8192
RANKS = (8, 16, 32, 64)
SEQUENCES = (256, 1024, 4096, 8192)
COST_BOUND, PADDING_BOUND, MILLISECONDS_BOUND = 1.02, 0.03, 100.0
TIMED = (4096, 64)
QWEN3_600M = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
}
COSTS: dict[str, SequenceCost] = {"flops": flops_cost(QWEN3_600M), "tokens": token_cost}


def gsm8k_like(random: np.random.Generator, num: int) -> np.ndarray:
    """Returns lengths of GSM8K questions with answers that contain reasoning.

    Questions of the training set have a median of 217 characters and a standard deviation of 0.38
    on the log scale; a token has about 4 characters, and eight rollouts share a question. Reference
    answers have a median of 257 characters and a standard deviation of 0.49. The lengths here have
    the same standard deviations. The median of the answers is longer, because a model that reasons
    writes about 250 tokens, and answers end at 1,024 tokens.
    """
    prompts = np.repeat(random.lognormal(np.log(54), 0.38, -(-num // 8)), 8)[:num]
    completions = np.minimum(random.lognormal(np.log(250), 0.49, num), 1024)
    return prompts + completions


def log_normal(random: np.random.Generator, num: int) -> np.ndarray:
    """Returns lengths of long reasoning.

    The median is 1,000 tokens, and one length in forty is above 7,000 tokens.
    """
    return random.lognormal(np.log(1000), 1.0, num)


def pareto(random: np.random.Generator, num: int) -> np.ndarray:
    """Returns lengths with a heavy tail (alpha 1.1).

    Half of them are below 480 tokens, and one in 45 is truncated to the length of a row.
    """
    return 256 * (1 + random.pareto(1.1, num))


TRACES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gsm8k": gsm8k_like,
    "lognormal": log_normal,
    "pareto": pareto,
}


def make_trace(name: str, num: int, seed: int) -> list[int]:
    random = np.random.default_rng([seed, num, list(TRACES).index(name)])
    return np.clip(TRACES[name](random, num).round(), 16, ROW_LEN).astype(int).tolist()


@dataclass(frozen=True)
class Case:
    """Holds one line of the table: max/mean, shares of padding, and milliseconds."""

    round_robin: float
    bucket_sort: float
    partition: float
    spread: float
    bound: float
    bound_in_rows: float
    padding_bfd: float
    padding: float
    padding_floor: float
    partition_ms: float
    spread_ms: float

    def problems(self) -> list[str]:
        found = []
        bounds = (
            ("partition", self.partition, self.bound),
            ("spread", self.spread, self.bound_in_rows),
        )
        for name, value, bound in bounds:
            allowed = COST_BOUND * bound if bound > COST_BOUND else COST_BOUND
            if value > allowed:
                found.append(f"{name} {value:.4f} > {allowed:.4f}")
        if self.padding > PADDING_BOUND >= self.padding_floor:
            found.append(f"padding {self.padding:.4f} > {PADDING_BOUND}")
        return found


def measure(lengths: Sequence[int], cost: SequenceCost, num_ranks: int, repeats: int) -> Case:
    costs = [cost(length) for length in lengths]
    mean = sum(costs) / num_ranks
    snake = _snake(costs, num_ranks)
    parts, partition_ms = _timed(lambda: partition(costs, num_ranks), repeats)
    layout = {"num_ranks": num_ranks, "row_len": ROW_LEN, "multiple": 1}
    spread, spread_ms = _timed(lambda: spread_by_cost(lengths, costs, **layout), repeats)
    fewest = rows_per_rank(fewest_rows(lengths, ROW_LEN), num_ranks, 1)

    def ratio(parts: Sequence[Sequence[int]]) -> float:
        return max(sum(costs[i] for i in part) for part in parts) / mean

    return Case(
        round_robin=ratio([range(rank, len(costs), num_ranks) for rank in range(num_ranks)]),
        bucket_sort=ratio(snake),
        partition=ratio(parts),
        spread=max(rank_costs(spread, costs)) / mean,
        bound=lower_bound(costs, num_ranks) / mean,
        bound_in_rows=lower_bound_with_sizes(costs, lengths, num_ranks, fewest * ROW_LEN) / mean,
        padding_bfd=_padding(spread_by_rows(lengths, **layout), lengths),
        padding=_padding(spread, lengths),
        padding_floor=1 - sum(lengths) / (num_ranks * fewest * ROW_LEN),
        partition_ms=partition_ms,
        spread_ms=spread_ms,
    )


def _snake(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    for turn, start in enumerate(range(0, len(order), num_ranks)):
        hand = order[start : start + num_ranks]
        for rank, thing in enumerate(hand):
            parts[rank if turn % 2 == 0 else num_ranks - 1 - rank].append(thing)
    return parts


def _padding(spread: Spread, lengths: Sequence[int]) -> float:
    return 1 - sum(lengths) / (len(spread) * len(spread[0]) * ROW_LEN)


def _timed(work: Callable[[], list], repeats: int) -> tuple[list, float]:
    result: list = []
    milliseconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = work()
        milliseconds.append(1e3 * (time.perf_counter() - begin))
    return result, statistics.median(milliseconds)


HEADER = (
    f"{'trace':9} {'ranks':>5} {'seqs':>5} | {'robin':>6} {'bucket':>6} {'partit':>6} "
    f"{'spread':>6} {'bound':>6} {'inrows':>6} | {'bfd':>6} {'spread':>6} {'floor':>6} | "
    f"{'part ms':>7} {'spr ms':>7}"
)


def row_of(trace: str, num_ranks: int, num: int, case: Case) -> str:
    mark = "  *" if case.problems() else ""
    return (
        f"{trace:9} {num_ranks:5} {num:5} | {case.round_robin:6.3f} {case.bucket_sort:6.3f} "
        f"{case.partition:6.3f} {case.spread:6.3f} {case.bound:6.3f} {case.bound_in_rows:6.3f} | "
        f"{case.padding_bfd:6.1%} {case.padding:6.1%} {case.padding_floor:6.1%} | "
        f"{case.partition_ms:7.1f} {case.spread_ms:7.1f}{mark}"
    )


def run(cost_name: str, seed: int, repeats: int) -> tuple[dict[tuple[str, int, int], Case], int]:
    """Prints one table; returns the cases and the number of bounds that are exceeded."""
    print(f"\ncost: {cost_name}, seed {seed}\n{HEADER}")
    cases, num_broken = {}, 0
    for trace in TRACES:
        for num_ranks in RANKS:
            for num in SEQUENCES:
                lengths = make_trace(trace, num, seed)
                times = 5 * repeats if (num, num_ranks) == TIMED else repeats
                case = measure(lengths, COSTS[cost_name], num_ranks, times)
                cases[trace, num_ranks, num] = case
                print(row_of(trace, num_ranks, num, case), flush=True)
                for problem in case.problems():
                    num_broken += 1
                    print(f"  FAIL {problem}")
    return cases, num_broken


def summary(cost_name: str, cases: Sequence[dict[tuple[str, int, int], Case]]) -> dict[str, float]:
    every = [case for table in cases for case in table.values()]
    even = [case for case in every if case.bound_in_rows <= COST_BOUND]
    dense = [case for case in every if case.padding_floor <= PADDING_BOUND]
    timed = [case for table in cases for (_, r, n), case in table.items() if (n, r) == TIMED]
    figures = {
        "cases": len(every),
        "cases_that_can_be_even": len(even),
        "worst_even_partition": max(case.partition for case in even),
        "worst_even_spread": max(case.spread for case in even),
        "worst_even_bucket_sort": max(case.bucket_sort for case in even),
        "worst_even_round_robin": max(case.round_robin for case in even),
        "worst_partition_over_bound": max(case.partition / case.bound for case in every),
        "worst_spread_over_bound": max(case.spread / case.bound_in_rows for case in every),
        "cases_that_can_be_dense": len(dense),
        "worst_dense_padding": max(case.padding for case in dense),
        "worst_dense_padding_bfd": max(case.padding_bfd for case in dense),
        "cases_above_fewest_rows": sum(case.padding > case.padding_floor + 1e-9 for case in every),
        "partition_4096_over_64_ms": max(case.partition_ms for case in timed),
        "spread_4096_over_64_ms": max(case.spread_ms for case in timed),
    }
    return {f"{cost_name}/{name}": float(value) for name, value in figures.items()}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--cost", nargs="+", choices=COSTS, default=list(COSTS))
    parser.add_argument("--seeds", type=int, default=1, help="number of traces of each kind")
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of times that a call is timed"
    )
    options = parser.parse_args()
    figures: dict[str, float] = {}
    num_broken = 0
    for cost_name in options.cost:
        tables = []
        for seed in range(options.seeds):
            table, broken = run(cost_name, seed, options.repeats)
            tables.append(table)
            num_broken += broken
        figures |= summary(cost_name, tables)
    print()
    for name, value in figures.items():
        print(f"{name:40} {value:.4g}")
    slowest = max(
        value for name, value in figures.items() if name.endswith("partition_4096_over_64_ms")
    )
    if slowest > MILLISECONDS_BOUND:
        num_broken += 1
        print(
            f"FAIL the partition of 4,096 sequences over 64 ranks took {slowest:.0f} ms, must be "
            f"<= {MILLISECONDS_BOUND:.0f} ms"
        )
    return finish(options, "balance", num_broken == 0, figures)


if __name__ == "__main__":
    sys.exit(main())
