"""Which sequences are left out as a whole, against numbers worked out by hand."""

import math

import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.objective import objective, weight_sums
from torchtitan.grpo.losses.rejection import (
    RejectionBounds,
    off_policy_sequences,
    rejected_sequences,
)

# Sequence 0 has ratios 4 and 1/2: log 4 - log 2 = log 2, mean log 2 / 2 = 0.347;
# k3 3 - log 4 and -1/2 + log 2, mean (2.5 - log 2) / 2 = 0.903; tv (3 + 1/2) / 2 / 2 = 0.875.
# Sequence 1 has 1/8 and 1: log 8 / 2 = 1.040; (-7/8 + log 8) / 2 = 0.602; 7/8 / 2 / 2 = 0.219.
# Between them stands a token that is not trained.
RATIOS = torch.tensor([[4.0, 0.5, 1.0, 0.125, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False, True, True]])
IDS = torch.tensor([[0, 0, 0, 1, 1]])
GENERATOR = torch.tensor([[-1.0, -2.0, 0.0, -3.0, -4.0]], dtype=torch.float64)
TRAINER = GENERATOR + RATIOS.log()


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("k1", math.log(2) / 2, math.log(8) / 2),
        ("k3", (2.5 - math.log(2)) / 2, (math.log(8) - 7 / 8) / 2),
        ("tv", 0.875, 7 / 32),
        ("ratio", 4.0, 8.0),
    ],
)
def test_a_sequence_is_rejected_just_above_its_divergence_worked_out_by_hand(name, first, second):
    def rejected(bound: float) -> tuple[bool, bool]:
        bounds = RejectionBounds(**{name: bound})
        found = rejected_sequences(TRAINER, GENERATOR, MASK, IDS, bounds)
        assert not found[0, 2]
        assert found[0, 0] == found[0, 1]
        assert found[0, 3] == found[0, 4]
        return bool(found[0, 0]), bool(found[0, 3])

    nothing, low, high = 1 - 1e-9, min(first, second), max(first, second)
    assert rejected(low * nothing) == (True, True)
    assert rejected(low * (1 + 1e-9)) == (first > second, second > first)
    assert rejected(high * nothing) == (first > second, second > first)
    assert rejected(high * (1 + 1e-9)) == (False, False)


def test_bounds_that_are_off_reject_nothing_and_several_reject_together():
    def rejected(**bounds: float) -> list[bool]:
        found = rejected_sequences(TRAINER, GENERATOR, MASK, IDS, RejectionBounds(**bounds))
        return [bool(found[0, 0]), bool(found[0, 3])]

    assert rejected() == [False, False]
    assert rejected(k1=1.0) == [False, True]
    assert rejected(tv=0.5) == [True, False]
    assert rejected(k1=1.0, tv=0.5) == [True, True]


def test_a_ratio_far_beyond_the_range_of_floats_is_rejected():
    trainer = torch.tensor([[-300.0, 0.0]])
    mask, ids = torch.ones(1, 2).bool(), torch.zeros(1, 2, dtype=torch.int64)
    for name in ("k1", "k3", "ratio"):
        bounds = RejectionBounds(**{name: 20.0})
        assert rejected_sequences(trainer, torch.zeros(1, 2), mask, ids, bounds).all()


@pytest.mark.parametrize(
    ("advantages", "threshold", "found"),
    [
        # generator - trainer: means -log(2) / 2 = -0.347 and log(8) / 2 = 1.040.
        ((-1.0, -1.0), 0.5, (False, True)),
        ((-1.0, -1.0), 1.05, (False, False)),
        ((-1.0, 1.0), 0.5, (False, False)),
        ((-1.0, 0.0), 0.5, (False, False)),
        ((-1.0, -1.0), 0.0, (False, False)),
    ],
)
def test_only_bad_sequences_that_the_policy_has_left_are_off_policy(advantages, threshold, found):
    first, second = advantages
    values = torch.tensor([[first, first, 0.0, second, second]], dtype=torch.float64)
    got = off_policy_sequences(TRAINER, GENERATOR, values, MASK, IDS, threshold)
    assert got[0].tolist() == [found[0], found[0], False, found[1], found[1]]


def test_truncated_weights_and_rejection_work_together(lab):
    """One sequence is truncated, one rejected, and the third keeps its ratio."""
    sequences = lab.make_sequences(0, num=3, num_ptx=0)
    for s, log_ratio in zip(sequences, (math.log(3), math.log(30), math.log(1.5)), strict=True):
        s.generator, s.old = s.logprobs.detach() - log_ratio, s.logprobs.detach()
    config = GRPO(mismatch_max_ratio=10.0, policy_loss="reinforce")
    inputs = lab.pack(sequences, [[0, 1, 2]], 24, config)
    loss, metrics = objective(inputs, config)
    loss.backward()
    num_tokens = sum(s.num_tokens for s in sequences)
    for s, weight in zip(sequences, (2.0, 0.0, 1.5), strict=True):
        expected = torch.full_like(s.logprobs, -weight * s.advantage / num_tokens)
        torch.testing.assert_close(s.logprobs.grad, expected)
    values = lab.metrics_of(config, metrics)
    assert values["mismatch/rejected_fraction"] == pytest.approx(1 / 3)
    assert values["mismatch/capped_fraction"] == sequences[0].num_tokens / num_tokens


@pytest.mark.parametrize(
    ("settings", "total", "num_kept"),
    [
        ({}, 2 + 0.5 + 0.125 + 1, 4),
        ({"mismatch_correction": "mask"}, 0.5 + 0.125 + 1, 3),
        ({"mismatch_max_ratio": 5.0}, 2 + 0.5, 2),
        ({"mismatch_veto": 0.2}, 2 + 0.5, 2),
        ({"mismatch_max_ratio": 2.0}, 0, 0),
    ],
)
def test_the_mean_weight_is_that_of_the_tokens_that_are_kept(settings, total, num_kept):
    config = GRPO(mismatch_normalize=True, **settings)
    junk = torch.where(MASK, TRAINER, math.nan)
    got = weight_sums(junk, GENERATOR, MASK, IDS, config)
    torch.testing.assert_close(got, torch.tensor([total, num_kept], dtype=torch.float64))


def test_normalized_weights_have_a_mean_of_one_and_do_not_touch_the_penalties(lab):
    """The policy's loss is divided by the mean weight of the whole batch, and nothing else is."""
    plain = GRPO(kl_coef=0.3, entropy_coef=0.1)
    normalized = GRPO(kl_coef=0.3, entropy_coef=0.1, mismatch_normalize=True)
    sequences = lab.make_sequences(0)
    inputs = lab.pack(sequences, [[0, 1, 2, 3], [4, 5, 6, 7, 8]], 48, plain)
    parts = [lab.row_slice(inputs, i, i + 1) for i in range(2)]
    mean = lab.mean_weight(normalized, parts)
    weights = [
        min(math.exp(s.old[t] - s.generator[t]), 2.0)
        for s in sequences
        for t in range(s.num_tokens)
        if not s.is_ptx
    ]
    assert mean.item() == pytest.approx(sum(weights) / len(weights))
    got, expected = [], []
    for part in parts:
        loss, metrics = objective(part, plain)
        own = metrics["loss/policy"].numbers[0]
        expected.append(loss - own + own / mean)
        got.append(objective(part, normalized, mean)[0])
    torch.testing.assert_close(torch.stack(got), torch.stack(expected))
    assert abs(mean.item() - 1) > 0.01
