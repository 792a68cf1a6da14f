import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.data.packing import (
    deal_rows,
    fewest_rows,
    fill_rows,
    pack_into,
    pack_rows,
    rows_per_rank,
    split_evenly,
)

lengths_strategy = st.lists(st.integers(1, 50), max_size=60)


@pytest.mark.parametrize("pack", [pack_rows, fill_rows])
@given(lengths=lengths_strategy)
def test_every_sequence_stands_in_one_row_and_no_row_overflows(pack, lengths):
    rows = pack(lengths, 50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 50 for row in rows)
    # Two rows that are both at most half full would have been one.
    assert sum(sum(lengths[i] for i in row) <= 25 for row in rows) <= 1
    assert rows == pack(lengths, 50)


@pytest.mark.parametrize("pack", [pack_rows, fill_rows])
@pytest.mark.parametrize("length", [0, 51])
def test_sequences_that_do_not_fit_are_refused(pack, length):
    with pytest.raises(ValueError, match=r"training\.seq_len"):
        pack([10, length], 50)


@given(lengths_strategy)
def test_best_fit_decreasing_keeps_its_known_bound(lengths):
    # 11/9 of the optimum and 6/9 of a row (Dosa, 2007); no packing is below the lower bound,
    # and the optimum is at most what filling found.
    optimum_at_most = len(fill_rows(lengths, 50))
    assert fewest_rows(lengths, 50) <= optimum_at_most
    assert fewest_rows(lengths, 50) <= len(pack_rows(lengths, 50)) <= 11 * optimum_at_most / 9 + 1


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), max_size=10))
def test_rows_that_are_full_are_no_fewer_than_the_bound(rows):
    # Rows that a packing is known of: the bound must not ask for more.
    rows = [row for row in rows if sum(row) <= 50]
    assert fewest_rows([length for row in rows for length in row], 50) <= len(rows)


def test_the_bound_counts_sequences_that_cannot_share():
    assert fewest_rows([26, 26, 26], 50) == 3
    # Two rows of tokens, but beside a 40 there is no room for a 20.
    assert fewest_rows([40, 40, 20], 50) == 3
    assert fewest_rows([25, 25, 25], 50) == 2
    assert fewest_rows([], 50) == 0


def test_rows_are_filled_to_the_last_token():
    # Best-fit decreasing puts 30 with 20 and needs a third row for the last 5.
    lengths = [30, 20, 18, 15, 12, 5]
    assert sorted(sum(lengths[i] for i in row) for row in fill_rows(lengths, 50)) == [50, 50]


@given(lengths_strategy, st.integers(0, 3))
def test_packing_into_given_rows_uses_no_more_and_finds_room_where_there_is_much(lengths, extra):
    num_rows = len(pack_rows(lengths, 50)) + extra
    if num_rows == 0:
        return
    rows = pack_into(lengths, [float(length**2) for length in lengths], num_rows, 50)
    assert rows is not None
    assert len(rows) == num_rows
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)


@given(lengths_strategy, st.integers(1, 8))
def test_parts_hold_everything_once_in_counts_that_differ_by_one_at_most(sizes, num_parts):
    parts = split_evenly(sizes, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in parts)
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert parts == split_evenly(sizes, num_parts)


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


def test_parts_and_ranks_get_even_sums_and_what_has_no_room_is_not_packed():
    assert split_evenly([9, 8, 2, 1], 2) == [[0, 3], [1, 2]]
    assert deal_rows([9, 8, 7], 2, 2) == [[0, None], [1, 2]]
    assert pack_into([26, 26, 26], [1, 1, 1], 2, 50) is None
