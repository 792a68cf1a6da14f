# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Activations that lie in host memory come back as they were, and the longest-kept ones go."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from torchtitan.grpo.pipeline.offload import (
    ActivationOffload,
    OffloadPlan,
    hidden_by_link,
    kept_for,
    longest_kept,
)
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.pipeline.tables.rules import one_forward_one_backward
from torchtitan.grpo.pipeline.tables.simulate import simulate

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
KEY = (0, 3)


class Net(nn.Module):
    """Keeps its hidden activation, which two layers save, and whose memory can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.left, self.right = nn.Linear(6, 20), nn.Linear(20, 6), nn.Linear(20, 6)
        self.hidden: list[torch.UntypedStorage] = []

    def forward(self, x):
        hidden = self.up(x)
        self.hidden.append(hidden.untyped_storage())
        return self.left(hidden) * self.right(hidden) + F.silu(x)


def holders(storage: torch.UntypedStorage) -> int:
    """Returns who holds a storage besides the caller."""
    return torch._C._storage_Use_Count(storage._cdata) - 1


def output_of(net, memory=None):
    torch.manual_seed(0)
    x = torch.randn(5, 4, 6, requires_grad=True)
    with memory.saving(KEY, net, [x]) if memory else nullcontext():
        return x, net(x)


def test_activations_leave_the_device_once_and_come_back_equal():
    torch.manual_seed(1)
    net, memory = Net(), ActivationOffload(torch.device("cpu"), least_bytes=0)
    x, output = output_of(net)
    output.sum().backward()
    expected = [x.grad, *(p.grad for p in net.parameters())]
    assert holders(net.hidden[0]) == 0, "The pass has ended."
    net.zero_grad()

    x, output = output_of(net, memory)
    assert holders(net.hidden[1]) == 0, "The activation is still on the device."
    # The hidden activation once, and both factors of the product; x and the weights stay.
    assert memory.host_bytes == 4 * 20 * (20 + 6 + 6)
    memory.fetch(KEY)
    output.sum().backward()
    memory.forget(KEY)
    assert memory.host_bytes == 0 and memory.peak_host_bytes == memory.saved_bytes[0] > 0
    found = [x.grad, *(p.grad for p in net.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_small_tensors_stay_and_counting_moves_nothing():
    net, memory = Net(), ActivationOffload(torch.device("cpu"), least_bytes=1000)
    output_of(net, memory)
    assert memory.host_bytes == 4 * 20 * 20
    x = torch.randn(5, 4, 6)
    counting = ActivationOffload(torch.device("cpu"), least_bytes=1000)
    with counting.saving(KEY, net, [x], moves=False):
        output = net(x)
    assert (counting.host_bytes, counting.saved_bytes) == (0, {0: 4 * 20 * 20})
    assert holders(net.hidden[-1]) > 0
    output.sum().backward()


def test_the_longest_kept_go_first_as_far_as_the_link_carries_them():
    table, costs = one_forward_one_backward(4, 6), Costs.uniform(4, 1, (1, 1, 1))
    found = simulate(table, costs)
    kept = kept_for(table.actions[0], found)
    assert longest_kept(kept)[0] == (0, 3), "Its gradient comes last in the steady state."
    assert kept_for(table.actions[3], found) == {(3, m): 0 for m in range(6)}
    assert longest_kept(kept_for(table.actions[3], found)) == []
    # A copy out and back takes 2 of the 27 units, of which four fifths may be used.
    all_six = hidden_by_link(kept, {0: 10}, 10.0, found.makespan)
    assert all_six == set(kept)
    assert len(hidden_by_link(kept, {0: 30}, 10.0, found.makespan)) == 3
    assert hidden_by_link(kept, {0: 1000}, 10.0, found.makespan) == set()


def test_what_a_step_leaves_behind_is_noticed_and_given_up():
    table, costs = one_forward_one_backward(4, 6), Costs.uniform(4, 1, (1, 1, 1))
    found = simulate(table, costs)
    plan = OffloadPlan(torch.device("cpu"), 1.0)
    plan.memory = memory = ActivationOffload(torch.device("cpu"), least_bytes=0)
    plan.begin(table, found, 0)
    net, x = Net(), torch.randn(5, 4, 6)
    with plan.forward(KEY, net, [x]):
        net(x)
    assert memory.host_bytes > 0
    with pytest.raises(AssertionError, match="were not fetched"):
        plan.finish()
    plan.begin(table, found, 0)
    assert memory.host_bytes == 0
    plan.finish()


PLAIN = {"pp": 2, "schedule": "Interleaved1F1B"}


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (2, [{}, {"schedule": "ZBVZeroBubble", "ac": "full", "early": -1}]),
        (4, [{"dp_shard": 2, "precision": "bfloat16", "schedule": "ZBVZeroBubble"}]),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in (
                (2, [{"schedule": "1F1B"}, {"ac": "selective op", "schedule": "ZBVZeroBubble"}]),
                (4, [{"tp": 2}]),
            )
        ),
    ],
    ids=["two ranks", "FSDP2", "two ranks, more", "TP"],
)
def test_a_pipeline_has_equal_gradients(num_ranks, layouts, make_model, run_ranks):
    _, folder = make_model("qwen3", num_hidden_layers=4, intermediate_size=78)
    cases = [PLAIN | layout | {"steps": 4} for layout in layouts]
    results = run_ranks(
        "deferred_gradients", num_ranks, model=folder, seq_len=12, sequences=SEQUENCES,
        rows=[[0], [1], [2], [3]],
        groups=[[case, *(case | {"offload": o} for o in (0.5, 1, -1))] for case in cases],
    )  # fmt: skip
    for rank, result in enumerate(results):
        for plain, *moving in result["groups"]:
            assert plain["offload"] is None and plain["metrics"] == {}
            for found in moving:
                assert found["different"] == []
                assert found["offload"]["left_bytes"] == 0
                peak = found["metrics"]["pipeline/offload_peak_gib"] * 2**30
                assert peak == found["offload"]["peak_bytes"]
            half, whole, hidden = moving
            assert hidden["offload"]["bandwidth"] > 0
            if rank == 0:  # which keeps activations while the others compute
                assert 0 < half["offload"]["peak_bytes"] <= whole["offload"]["peak_bytes"]
                moved = [f["metrics"]["pipeline/offload_gib"] * 2**30 for f in (half, whole)]
                assert 0 < moved[0] <= moved[1]
                assert half["offload"]["peak_bytes"] < moved[0], "all steps since the last call"
