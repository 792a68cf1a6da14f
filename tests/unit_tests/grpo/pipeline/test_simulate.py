# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The simulator agrees with hand numbers and names what is wrong with a table."""

import pytest

from torchtitan.grpo.pipeline.tables.actions import Action, Costs, StageCosts, Table
from torchtitan.grpo.pipeline.tables.simulate import TableError, simulate


def table_of(*ranks: str, microbatches: int, stages: tuple[int, ...] | None = None) -> Table:
    """A table from strings such as ``0F0 0B0``, by default with one stage a rank."""
    actions = tuple(
        tuple(Action(int(word[0]), word[1], int(word[2])) for word in rank.split())  # pyright: ignore
        for rank in ranks
    )
    return Table(stages or tuple(range(len(ranks))), microbatches, actions)


def test_times_by_hand():
    table = table_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1", microbatches=2)
    costs = Costs((StageCosts(2, 1, 1), StageCosts(1, 3, 2, full_backward=4)), hop=0.5)
    found = simulate(table, costs)
    starts = {str(action): time for action, time in found.starts.items()}
    assert starts == {
        "0F0": 0, "0F1": 2, "1F0": 2.5, "1B0": 3.5, "1F1": 7.5, "1I1": 8.5, "1W1": 11.5,
        "0B0": 8, "0B1": 12,
    }  # fmt: skip
    assert (found.makespan, found.spans, found.busy) == (14, (14, 11), (8, 11))
    assert found.bubble == pytest.approx(1 - 19 / 28)
    assert found.span_bubble == pytest.approx(6 / 14)


def test_blocks_are_recomputed_while_a_rank_waits_for_a_gradient():
    table = table_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=2)
    costs = Costs((StageCosts(1, 2, 1, recompute=1), StageCosts(1, 2, 1, recompute=1)))
    found = simulate(table, costs)
    starts = {str(action): time for action, time in found.starts.items()}
    # The gradient of 0B0 is there at 5, and that of 0B1 at 9.
    assert starts == {
        "0F0": 0, "0F1": 1, "1F0": 1, "1B0": 2, "1F1": 5, "1B1": 6, "0B0": 4, "0B1": 8,
    }  # fmt: skip
    assert found.makespan == 11
    late = simulate(table, Costs((StageCosts(1, 2, 1), StageCosts(1, 2, 1))))
    assert late.makespan == 12


def test_sizes_of_microbatches_stretch_their_passes():
    table = table_of("0F0 0B0 0F1 0B1", microbatches=2)
    costs = Costs((StageCosts(1, 1, 1),), sizes=(0.5, 2.0))
    assert simulate(table, costs).makespan == 0.5 * 3 + 2.0 * 3


def test_memory_is_held_to_the_end_of_what_gives_it_back():
    stage = StageCosts(1, 1, 1, activation=10, pending=4)
    held_by = {"0F0 0B0 0F1 0B1": 10, "0F0 0F1 0B0 0B1": 20, "0F0 0I0 0F1 0W0 0I1 0W1": 14}
    for rank, peak in held_by.items():
        assert simulate(table_of(rank, microbatches=2), Costs((stage,))).peak == peak


EARLIER = "Rank 0 would wait forever before 0B0: it needs "


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("0F0 0B0 0F0", "1F0 1B0"), "Rank 0 must run 0F0 once, but the table lists it more than"),
        (("0F0 0B0", "1B0"), "Rank 1 must run 1F0, which the table lacks"),
        (("0F0 0B0 1F0", "1B0"), "Rank 0 must not run 1F0: it does not hold the stage"),
        (("0F0 0I0", "1F0 1B0"), "Rank 0 must run either 0B0 or both 0I0 and 0W0"),
        (("0F0 0B0 0W0", "1F0 1B0"), "Rank 0 must run either 0B0 or both 0I0 and 0W0"),
        (("0F0 0B0 0F1", "1F0 1B0"), "Rank 0 must not run 0F1: there are only 1 microbatches"),
        (("0B0 0F0", "1F0 1B0"), EARLIER + "0F0 of rank 0, which comes later"),
        (("0F0 0B0", "1B0 1F0"), EARLIER + "1I0 or 1B0 of rank 1"),
    ],
)
def test_a_table_that_cannot_run_is_refused_by_rank_and_action(ranks, message):
    with pytest.raises(TableError) as error:
        simulate(table_of(*ranks, microbatches=1), Costs.uniform(2, 1))
    assert message in str(error.value)
