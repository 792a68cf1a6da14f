# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""No microbatch makes the training thread wait for a device."""

import pytest

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12]]


@pytest.fixture
def waits(make_model, run_ranks):
    def find(num_ranks, *cases):
        _, folder = make_model("llama", num_hidden_layers=4, intermediate_size=78)
        results = run_ranks(
            "no_waiting", num_ranks, model=folder, seq_len=16, sequences=SEQUENCES,
            rows=[[0, 1], [2], []], cases=cases,
        )  # fmt: skip
        return [[case["waits"] for case in result["cases"]] for result in results]

    return find


def test_forward_loss_and_backward_of_a_whole_model_wait_for_nothing(waits):
    losses, checkpointed = {"entropy_coef": 0.1, "kl_coef": 0.1}, {"ac": "full"}
    (found,) = waits(1, {}, losses, checkpointed, {"attention": "varlen"}, {"item": True})
    assert found[:4] == [[]] * 4
    assert found[4] and set(found[4]) == {"aten._local_scalar_dense.default"}


def test_sharded_models_and_pipelines_wait_for_nothing(waits):
    pipeline = {"pp": 2, "schedule": "ZBVZeroBubble", "attention": "varlen"}
    cases = [{"dp_shard": 2}, {"cp": 2, "attention": "varlen"}, pipeline, {"tp": 2}]
    # Torch's sharded embedding writes a number of the host where a mask is set. It looks like
    # waiting, and on a GPU it is a kernel that takes the number as an argument.
    embedding = {"aten.index_put_.default", "aten._local_scalar_dense.default"}
    for *others, tensor_parallel in waits(2, *cases):
        assert others == [[]] * 3
        assert set(tensor_parallel) <= embedding
        assert len(tensor_parallel) in (3, 2 * 3)  # one or two a microbatch, from torch 2.15 on one
