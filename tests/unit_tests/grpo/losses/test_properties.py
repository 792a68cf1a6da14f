"""What must not change the loss: the order of groups, padding, rows, microbatches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.advantages import compute_advantages, informative_samples
from torchtitan.grpo.losses.objective import objective

CONFIGS = st.builds(
    GRPO,
    policy_loss=st.sampled_from(["clip", "gspo", "cispo", "reinforce"]),
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "constant_length"]),
    old_policy=st.sampled_from(["step_start", "sampling"]),
    mismatch_correction=st.sampled_from(["none", "truncate", "mask"]),
    mismatch_level=st.sampled_from(["token", "sequence", "geometric"]),
    importance_cap=st.sampled_from([1.2, 2.0]),
    importance_floor=st.sampled_from([0.0, 0.7]),
    mismatch_max_k3=st.sampled_from([0.0, 0.3]),
    off_policy_mask_threshold=st.sampled_from([0.0, 0.2]),
    kl_coef=st.sampled_from([0.0, 0.1]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
)
NUM_SEQUENCES = 9

profile = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def layouts(draw):
    """Sequences in some order, cut into rows, rows padded, rows cut into microbatches."""
    order = draw(st.permutations(range(NUM_SEQUENCES)))
    cuts = sorted(draw(st.sets(st.integers(1, NUM_SEQUENCES - 1), max_size=4)))
    rows = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, NUM_SEQUENCES], strict=True)]
    for _ in range(draw(st.integers(0, 2))):
        rows.insert(draw(st.integers(0, len(rows))), [])
    row_len = NUM_SEQUENCES * 8 + draw(st.integers(0, 5))
    ends = sorted(draw(st.sets(st.integers(1, len(rows)), max_size=3)) | {len(rows)})
    return rows, row_len, list(zip([0, *ends], ends, strict=False))


@profile
@given(config=CONFIGS, layout=layouts(), seed=st.integers(0, 10_000))
def test_no_layout_changes_loss_gradients_or_metrics(lab, config, layout, seed):
    one_row = [list(range(NUM_SEQUENCES))], NUM_SEQUENCES * 8, [(0, 1)]
    results = []
    for (rows, row_len, microbatches), junk in ((one_row, 0.0), (layout, float("nan"))):
        sequences = lab.make_sequences(seed)
        inputs = lab.pack(sequences, rows, row_len, config, junk=junk)
        parts = [lab.row_slice(inputs, *ends) for ends in microbatches]
        losses, metrics = zip(*(objective(part, config) for part in parts), strict=True)
        loss = torch.stack(losses).sum()
        loss.backward()
        results.append(
            ((loss.detach(), lab.gradients(sequences)), lab.metrics_of(config, *metrics))
        )
    (plain, metrics), (other, other_metrics) = results
    torch.testing.assert_close(other, plain, rtol=1e-10, atol=1e-12)
    assert other_metrics == pytest.approx(metrics, rel=1e-10, abs=1e-13)


KINDS = ["group_norm", "group_mean", "leave_one_out", "batch_norm"]
ADVANTAGES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
    }
)


@st.composite
def tables(draw):
    """Rewards and group ids of some samples."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    num = sum(sizes)
    reward = st.sampled_from([0.0, 0.1, 1.0, -2.5]) | st.floats(-3, 3)
    rewards = draw(st.lists(reward, min_size=num, max_size=num))
    return np.array(rewards), np.repeat(np.arange(len(sizes)), sizes)


@profile
@given(table=tables(), settings_=ADVANTAGES, data=st.data())
def test_neither_order_nor_names_of_groups_change_an_advantage(table, settings_, data):
    rewards, groups = table
    order = np.array(data.draw(st.permutations(range(len(rewards)))))
    names = np.array(data.draw(st.permutations(range(10, 20))))
    renamed = names[groups]
    plain = compute_advantages(rewards, groups, **settings_)
    moved = compute_advantages(rewards[order], renamed[order], **settings_)
    np.testing.assert_allclose(moved, plain[order], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        informative_samples(rewards[order], renamed[order]),
        informative_samples(rewards, groups)[order],
    )


@profile
@given(table=tables(), settings_=ADVANTAGES)
def test_groups_that_say_nothing_have_no_advantage_and_centered_ones_add_up_to_zero(
    table, settings_
):
    rewards, groups = table
    got = compute_advantages(rewards, groups, **settings_)
    informative = informative_samples(rewards, groups)
    if settings_["kind"] != "batch_norm" or len(set(groups)) < len(groups):
        assert (got[~informative] == 0).all()
    for group in set(groups[informative]):
        assert abs(got[groups == group].sum()) < 1e-4 * max(abs(got).max(), 1)
