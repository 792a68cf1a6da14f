# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How fast lent and other servers are, as the scheduler is told."""

import pytest
from local_server import PROMPT, SAMPLING, LocalServer, attested, submit

from torchtitan.grpo.rollout.lending.rates import Rates

LENT, OTHER = "http://lent", "http://other"


def test_groups_per_second_are_measured_only_while_servers_are_held_back_by_nothing():
    dispatcher = attested(LocalServer(LENT), LocalServer(OTHER))
    rates = Rates(dispatcher, lambda: [LENT])
    lent, other = (dispatcher.servers[url] for url in (LENT, OTHER))
    assert (rates.lent, rates.other) == (None, None)
    # Seconds, tokens of both, whether the trainer waits, and whether lent servers are awake.
    for now, of_lent, of_other, is_asked, are_awake in [
        (0.0, 0, 0, False, False),
        (1.0, 40, 0, True, True),
        (3.0, 40, 40, True, True),
        (13.0, 0, 10, False, True),
        (23.0, 0, 10, True, False),
        (33.0, 10, 10, False, False),
    ]:
        lent.num_tokens += of_lent
        other.num_tokens += of_other
        rates.note(now, is_asked=is_asked, are_awake=are_awake)
    groups, part = rates.take_step(10.0)  # tokens per group
    assert (groups, part) == (9.0, pytest.approx(90 / 160))
    assert rates.lent == pytest.approx(80 / 13 / 10)
    assert rates.other == pytest.approx(50 / 13 / 10)
    assert rates.take_step(10.0) == (0.0, 0.0)
    lent.num_tokens += 64
    rates.note(33.0 + 1e-9, is_asked=False, are_awake=True)
    assert rates.lent == pytest.approx((80 * 0.64 + 64) / (13 * 0.64) / 10), (
        "later steps count more"
    )
    lent.version = other.version = None
    assert rates.other == 0.0, "lost servers generate nothing"
    assert rates.lent != 0.0, "those that sleep will"
    dispatcher.remove(LENT)
    assert rates.lent == 0.0


async def test_the_tokens_of_rollouts_count_for_the_server_that_generated_them():
    dispatcher = attested(LocalServer(LENT), LocalServer(OTHER))
    await submit(dispatcher, OTHER)
    server = dispatcher.servers[LENT]
    await dispatcher.submit(PROMPT, server, SAMPLING, allowed=lambda _: True)  # an evaluation
    assert [server.num_tokens for server in dispatcher.servers.values()] == [0, 4]
