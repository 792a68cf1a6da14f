"""Packing, splitting and dealing keep their invariants for any lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.data.packing import deal_rows, pack_rows, rows_per_rank, split_evenly

lengths_strategy = st.lists(st.integers(1, 50), max_size=60)


@given(lengths_strategy)
def test_every_sequence_stands_in_one_row_and_no_row_overflows(lengths):
    rows = pack_rows(lengths, 50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 50 for row in rows)
    # Two rows that are both at most half full would have been one.
    assert sum(sum(lengths[i] for i in row) <= 25 for row in rows) <= 1
    assert rows == pack_rows(lengths, 50)


@pytest.mark.parametrize("length", [0, 51])
def test_sequences_that_do_not_fit_are_refused(length):
    with pytest.raises(ValueError, match=r"training\.seq_len"):
        pack_rows([10, length], 50)


@given(lengths_strategy, st.integers(1, 8))
def test_parts_hold_everything_once_in_counts_that_differ_by_one_at_most(sizes, num_parts):
    parts = split_evenly(sizes, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in parts)
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert parts == split_evenly(sizes, num_parts)


def test_parts_are_evened_out():
    assert split_evenly([9, 8, 2, 1], 2) == [[0, 3], [1, 2]]
    assert split_evenly([5, 5, 5], 2) == [[0, 2], [1]]
    assert split_evenly([5], 3) == [[0], [], []]


@given(lengths_strategy, st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
def test_every_rank_is_dealt_the_same_number_of_rows(tokens, num_ranks, multiple, extra):
    fewest = rows_per_rank(len(tokens), num_ranks, multiple)
    assert fewest % multiple == 0
    assert fewest > 0
    # No more empty rows than the rounding asks for.
    assert fewest * num_ranks < len(tokens) + num_ranks * multiple or not tokens
    dealt = deal_rows(tokens, num_ranks, fewest + extra * multiple)
    assert {len(rows) for rows in dealt} == {fewest + extra * multiple}
    given_out = [row for rows in dealt for row in rows if row is not None]
    assert sorted(given_out) == list(range(len(tokens)))


def test_snake_order_evens_out_the_sums():
    assert deal_rows([9, 8, 7, 6], 2, 2) == [[0, 3], [1, 2]]
    assert deal_rows([9, 8, 7], 2, 2) == [[0, None], [1, 2]]
