import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.data.packing import fewest_rows, fill_rows, pack_rows

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


@pytest.mark.parametrize("pack", [pack_rows, fill_rows, fewest_rows])
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
