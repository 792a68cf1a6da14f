# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Log-probabilities of fixed tokens: kept by version, compared strictly."""

import asyncio
import math
import threading

import pytest

from torchtitan.grpo.attestation.bound import Bound
from torchtitan.grpo.attestation.comparison import compare
from torchtitan.grpo.attestation.probes import Probes, probe_tokens
from torchtitan.grpo.inference.client import ServerError


def fixed(value: float) -> Bound:
    return Bound(value, None, value)


def test_probe_tokens_are_the_same_each_time_and_of_the_vocabulary():
    tokens = probe_tokens(1000)
    assert tokens == probe_tokens(1000)
    assert tokens != probe_tokens(1000, seed=1)
    assert len(tokens) == 48
    assert all(0 <= token < 1000 for token in tokens)
    assert len(set(tokens)) > 40


@pytest.mark.parametrize("sizes", [(0, 48), (10, 1)])
def test_probe_tokens_with_nothing_to_predict_are_refused(sizes):
    with pytest.raises(ValueError, match="Probe tokens need"):
        probe_tokens(*sizes)


def test_only_the_newest_versions_are_kept():
    probes = Probes(num_kept=2)
    for version in (3, 1, 2):
        probes.put(version, [-float(version)])
    assert [probes.get(version) for version in (1, 2, 3)] == [None, (-2.0,), (-3.0,)]


def test_a_lane_waits_until_the_training_thread_has_said_what_to_expect():
    probes = Probes()

    async def wait():
        waiting = asyncio.create_task(probes.wait_for(5, 30.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        training = threading.Thread(target=probes.put, args=(5, [-1.0, -2.0]))
        training.start()
        training.join()
        return await waiting

    assert asyncio.run(wait()) == (-1.0, -2.0)


def test_waiting_ends_with_an_error_that_names_the_version_and_the_setting():
    with pytest.raises(
        TimeoutError, match=r"policy_version 5 .* 0\.01 s.*weight_sync\.attest_every"
    ):
        asyncio.run(Probes().wait_for(5, 0.01))


def test_nobody_waits_for_a_version_whose_place_newer_ones_have_taken():
    probes = Probes(num_kept=2)
    for version in (10, 20, 30):
        probes.put(version, [0.0])
    assert asyncio.run(probes.wait_for(10, 30.0)) is None


def test_equal_within_the_tolerance_passes():
    assert compare([-1.0, -2.0], [-1.0, -2.0], fixed(0.0)) == 0
    assert compare([-1.0, -2.0], [-1.1, -2.0], fixed(0.051)) == pytest.approx(0.05)


@pytest.mark.parametrize("served", [-2.4, -1.6])
def test_a_difference_is_told_with_its_size_place_and_setting(served: float):
    message = (
        r"within 0\.05 .* differ by 0\.2, at most by 0\.4 at position 1 "
        rf"\(trainer -2\.00000, server {served:.5f}\).*weight_sync\.attest_tolerance"
    )
    with pytest.raises(ServerError, match=message):
        compare([-1.0, -2.0], [-1.0, served], fixed(0.05))


def test_differences_of_both_signs_do_not_cancel():
    with pytest.raises(ServerError, match=r"differ by 0\.4, at most by 0\.4 at position 0"):
        compare([-1.0, -2.0], [-1.4, -1.6], fixed(0.05))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whose", ["trainer", "server"])
def test_what_is_not_finite_never_passes(value, whose):
    fine, bad = [-1.0, -2.0], [-1.0, value]
    expected, served = (bad, bad) if whose == "trainer" else (fine, bad)
    with pytest.raises(ServerError, match=f"the {whose}'s at position 1 is {value}"):
        compare(expected, served, fixed(math.inf))


@pytest.mark.parametrize("served", [[], [-1.0], [-1.0, -2.0, -3.0]])
def test_another_number_of_logprobs_is_refused(served):
    with pytest.raises(ServerError, match=f"must return 2 .* got {len(served)}"):
        compare([-1.0, -2.0], served, fixed(1.0))
