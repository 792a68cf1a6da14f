import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.data.balance import even_out, lower_bound, lower_bound_with_sizes, partition
from torchtitan.grpo.data.cost import flops_cost

costs_strategy = st.lists(
    st.one_of(st.integers(0, 1000), st.floats(0, 1e16, allow_nan=False)), max_size=80
)


def sums_of(parts, costs):
    return [sum(costs[i] for i in part) for part in parts]


def test_the_example_of_the_method_comes_out():
    costs = [8, 7, 6, 5, 4]
    assert partition(costs, 3) == [[0], [1, 4], [2, 3]]
    # Karmarkar and Karp's: differencing ends at a difference of 2, a swap finds the optimum.
    assert sums_of(partition(costs, 2, tolerance=math.inf), costs) == [14, 16]
    assert sums_of(partition(costs, 2), costs) == [15, 15]


@given(costs_strategy, st.integers(1, 12), st.booleans())
def test_everything_stands_in_one_part(costs, num_parts, equal_counts):
    parts = partition(costs, num_parts, equal_counts=equal_counts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    sums = sums_of(parts, costs)
    assert sums == sorted(sums)
    counts = [len(part) for part in parts]
    assert not equal_counts or max(counts) - min(counts) <= 1
    assert parts == partition(np.array(costs), num_parts, equal_counts=equal_counts)


@given(costs_strategy, st.integers(1, 12))
def test_the_heaviest_part_lies_between_its_bounds(costs, num_parts):
    heaviest = max(sums_of(partition(costs, num_parts), costs))
    bound = lower_bound(costs, num_parts)
    assert heaviest >= bound * (1 - 1e-9)
    # What any greedy split keeps: the mean, and the largest thing on top of it.
    assert heaviest <= (sum(costs) / num_parts + max(costs, default=0)) * (1 + 1e-9)


def test_the_bound_knows_of_things_that_must_meet_and_of_parts_that_are_full():
    # Four of 5 in three parts: two meet, though the mean is below 7.
    assert lower_bound([5, 5, 5, 5], 3) == 10
    assert [lower_bound(costs, 3) for costs in ([9, 1, 1], [2, 2, 2], [])] == [9, 2, 0]
    # Costs are squares. The part of the 4 has to take all four 1: 20, though the mean is 18.
    sizes = [4, 2, 2, 2, 2, 1, 1, 1, 1]
    costs = [size**2 for size in sizes]
    assert lower_bound(costs, 2) == 18
    assert lower_bound_with_sizes(costs, sizes, 2, 8) == 20
    assert lower_bound_with_sizes(costs, sizes, 2, 100) == 18


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=5))
def test_no_split_is_below_its_bounds(parts):
    sizes = [size for part in parts for size in part]
    if not sizes:
        return
    costs = [float(size**2) for size in sizes]
    heaviest = max(sum(size**2 for size in part) for part in parts)
    part_size = max(map(sum, parts))
    bound = lower_bound_with_sizes(costs, sizes, len(parts), part_size)
    assert lower_bound(costs, len(parts)) <= bound <= heaviest * (1 + 1e-9)


@given(st.data())
def test_evening_out_keeps_rows_short_and_makes_no_part_heavier(data):
    per_part, num_parts, row_size = 2, 3, 20
    num_rows = per_part * num_parts
    rows = [[] for _ in range(num_rows)]
    sizes = data.draw(st.lists(st.integers(1, 12), max_size=20))
    placed = []
    for size in sizes:
        fitting = [r for r in range(num_rows) if sum(rows[r]) + size <= row_size]
        if fitting:
            row = data.draw(st.sampled_from(fitting))
            rows[row].append(size)
            placed.append((size, row))
    sizes, row_of = [size for size, _ in placed], np.array([row for _, row in placed], np.int64)
    costs = [size * size for size in sizes]
    part_of_row = np.arange(num_rows) // per_part

    def heaviest(row_of):
        return np.bincount(part_of_row[row_of], weights=costs, minlength=num_parts).max()

    after = even_out(
        costs, row_of, num_rows, part_of_row=part_of_row, sizes=sizes, row_size=row_size
    )
    assert after.shape == row_of.shape
    assert (np.bincount(after, weights=sizes, minlength=num_rows) <= row_size).all()
    assert heaviest(after) <= heaviest(row_of)


def test_evening_out_moves_only_what_fits():
    # Both of row 0's things would help row 1, but only the smaller one fits there.
    costs, sizes = [30, 50, 10], [3, 5, 6]
    after = even_out(costs, np.array([0, 0, 1]), 2, sizes=sizes, row_size=9)
    assert after.tolist() == [1, 0, 1]
    kept = even_out(costs, np.array([0, 0, 1]), 2, sizes=sizes, row_size=8)
    assert kept.tolist() == [0, 0, 1]


def test_full_rows_swap_one_long_thing_for_several_short_ones():
    # Costs are squares; no swap of single things helps, and all rows are full.
    sizes = [4, 4, 2, 2, 2, 2]
    costs = [size**2 for size in sizes]
    row_of = np.array([0, 0, 1, 1, 1, 1])
    kept = even_out(costs, row_of, 2, sizes=sizes, row_size=8)
    assert kept.tolist() == row_of.tolist()
    after = even_out(costs, row_of, 2, sizes=sizes, row_size=8, bundles=True)
    assert np.bincount(after, weights=costs).tolist() == [24, 24]
    assert np.bincount(after, weights=sizes).tolist() == [8, 8]


DENSE = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 3, "intermediate_size": 10, "vocab_size": 50,
}  # fmt: skip
MOE = (
    DENSE
    | {"architectures": ["Qwen3MoeForCausalLM"]}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 5, "intermediate_size": 999}
)


def test_a_dense_model_costs_its_products_by_hand(repository):
    cost = flops_cost(DENSE)
    # A layer: queries and output 8 x 12, keys and values 8 x 6, the gated feed-forward 3 x 8 x 10.
    weights = 2 * (2 * 96 + 2 * 48 + 240) + 8 * 50
    assert cost.per_token == 3 * 2 * weights
    # Two layers; scores and values, twelve multiplications and additions each.
    assert cost.per_pair == 3 * 2 * 2 * (2 * 12)
    assert cost(3) == 3 * cost.per_token + 6 * cost.per_pair
    short = {k: v for k, v in DENSE.items() if k not in ("head_dim", "num_key_value_heads")}
    assert flops_cost(short) == flops_cost(short | {"head_dim": 2, "num_key_value_heads": 4})
    shipped = json.loads((repository / "assets/reverse_digits/model/config.json").read_text())
    assert flops_cost(shipped)(64) > 2 * flops_cost(shipped)(32) > 0


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_tokens_meet_the_experts_that_they_are_sent_to(key):
    weights = 2 * (2 * 96 + 2 * 48 + 8 * 16 + 2 * 3 * 8 * 5) + 8 * 50
    cost = flops_cost(MOE | {key: 16})
    assert (cost.per_token, cost.per_pair) == (3 * 2 * weights, flops_cost(DENSE).per_pair)
