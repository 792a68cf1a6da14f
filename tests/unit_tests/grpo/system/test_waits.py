# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ranks of a restart wait for one another in a used store, and attempts are some time apart."""

import threading

import pytest
import torch.distributed as dist

from torchtitan.grpo.system.store_rounds import agree_on_round
from torchtitan.grpo.system.waits import Backoff

SECONDS = 60.0


def agree(store: dist.Store, world_size: int, starts: list[int]) -> dict[int, str]:
    names: dict[int, str] = {}

    def join(rank: int) -> None:
        names[rank] = agree_on_round(store, rank, world_size, SECONDS)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return names


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_each_round_has_a_name_of_its_own_that_all_its_ranks_know(store, order):
    rounds = [agree(store, 3, order) for _ in range(3)]
    assert all(set(names) == {0, 1, 2} and len(set(names.values())) == 1 for names in rounds)
    assert len({names[0] for names in rounds}) == 3


def test_a_rank_that_died_while_the_ranks_agreed_is_not_taken_for_its_successor(store):
    store.set("torchtitan_grpo/round/of_rank/1", "the number of a rank that has died")
    names = agree(store, 2, [0, 1])
    assert names[0] == names[1]


def test_a_rank_that_does_not_come_is_named(store):
    with pytest.raises(TimeoutError, match=r"All 3 training ranks.*\[1, 2\] have not"):
        agree_on_round(store, 0, 3, 0.1)


def test_the_pause_doubles_up_to_the_longest_and_starts_again_after_a_success():
    backoff = Backoff(1.0, 5.0)
    assert [backoff.seconds_after_failure() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.seconds_after_failure() == 1.0
    backoff.num_failures = 10**6
    assert backoff.seconds_after_failure() == 5.0, "a float does not overflow"
