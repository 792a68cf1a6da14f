import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.data.balance import lower_bound_with_sizes
from torchtitan.grpo.data.cost import FlopsCost
from torchtitan.grpo.data.packing import fewest_rows, rows_per_rank
from torchtitan.grpo.data.spread import group_rows, rank_costs, spread_by_cost, spread_by_rows

ROW_LEN = 50
COST = FlopsCost(10.0, 1.0)

lengths_strategy = st.lists(st.integers(1, ROW_LEN), max_size=60)


def costs_of(lengths):
    return [COST(length) for length in lengths]


def check(spread, lengths, num_ranks, multiple):
    """The invariants of the module; returns the rows of a rank."""
    assert len(spread) == num_ranks
    placed = [i for rows in spread for row in rows for i in row]
    assert sorted(placed) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= ROW_LEN for rows in spread for row in rows)
    counts = {len(rows) for rows in spread}
    assert len(counts) == 1
    count = counts.pop()
    assert count % multiple == 0 and count > 0
    return count


@given(lengths_strategy, st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
def test_every_rank_gets_as_many_rows_and_every_sequence_a_place(
    lengths, num_ranks, multiple, more
):
    layout = {"num_ranks": num_ranks, "row_len": ROW_LEN, "multiple": multiple}
    costs = costs_of(lengths)
    by_cost = spread_by_cost(lengths, costs, **layout, min_rows=more * multiple)
    by_rows = spread_by_rows(lengths, **layout, min_rows=more * multiple)
    count = check(by_cost, lengths, num_ranks, multiple)
    assert count >= more * multiple
    # Balance costs no rows.
    assert count <= check(by_rows, lengths, num_ranks, multiple)
    sums = rank_costs(by_cost, costs)
    assert sums == sorted(sums)
    assert by_cost == spread_by_cost(lengths, costs, **layout, min_rows=more * multiple)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("num", [128, 512])
def test_ranks_are_even_where_nothing_forbids_it(num, num_ranks):
    random = np.random.default_rng(num)
    lengths = np.clip(random.lognormal(2, 0.8, num).round(), 1, ROW_LEN).astype(int).tolist()
    costs = costs_of(lengths)
    spread = spread_by_cost(lengths, costs, num_ranks=num_ranks, row_len=ROW_LEN, multiple=1)
    count = check(spread, lengths, num_ranks, 1)
    assert count == rows_per_rank(fewest_rows(lengths, ROW_LEN), num_ranks, 1)
    bound = lower_bound_with_sizes(costs, lengths, num_ranks, count * ROW_LEN)
    assert max(rank_costs(spread, costs)) <= 1.02 * bound


def test_a_row_is_not_added_for_the_sake_of_balance():
    # By cost alone the 50 would stand against four of 25, which are two rows.
    lengths = [50, 25, 25, 25, 25, 25, 25]
    costs = [100.0, 20, 20, 20, 20, 20, 20]
    spread = spread_by_cost(lengths, costs, num_ranks=2, row_len=50, multiple=1)
    assert check(spread, lengths, 2, 1) == 2
    assert sorted(rank_costs(spread, costs)) == [80, 140]
    # With a third row for each rank there is room for a better balance.
    wide = spread_by_cost(lengths, costs, num_ranks=2, row_len=50, multiple=1, min_rows=3)
    assert sorted(rank_costs(wide, costs)) == [100, 120]


@given(st.lists(st.integers(0, ROW_LEN), min_size=1, max_size=20), st.integers(1, 4))
def test_grouped_rows_are_the_same_rows_the_heaviest_microbatch_first(lengths, size):
    rows = [[i] for i in range(len(lengths) // size * size)]
    costs = costs_of(lengths)
    if not rows:
        return
    grouped = group_rows(rows, costs, size)
    assert sorted(grouped) == rows
    sums = [
        sum(costs[i] for row in grouped[r : r + size] for i in row)
        for r in range(0, len(grouped), size)
    ]
    assert sums == sorted(sums, reverse=True)
