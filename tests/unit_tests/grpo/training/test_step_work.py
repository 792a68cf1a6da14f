# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The counted work of a training step is what can be computed by hand, and no microbatch waits."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def found(repository, made_once):
    def make(folder):
        program = repository / "tests/programs/counted_steps.py"
        command = [sys.executable, program, folder, folder / "result.json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-6000:]

    return json.loads((made_once("counted_steps", make) / "result.json").read_text())


def test_an_elementwise_pass_reads_its_operands_and_writes_its_result(found):
    size, sums = 8 * 1000 * 2, 8 * 2
    counts = {name: (x["launches"], x["bytes"]) for name, x in found["elementwise"].items()}
    assert counts["add"] == counts["in place"] == (1, 2 * size)  # one operand, twice
    assert counts["fill"] == (1, size)
    # A compiled pass is one kernel, and reads once.
    assert counts["eager"] == (3, 5 * size + sums)
    assert counts["compiled"] == (1, size + sums)


def test_products_are_those_of_the_formula(found):
    # The backward pass of attention computes one product again, and the head some of its logits.
    plain = found["plain"]
    head = plain["parts"]["head"]["flops"] - plain["head"]
    assert 0 <= head <= plain["head"] / 3
    assert plain["total"]["flops"] == pytest.approx(
        plain["needed"] + plain["attention_backward"] + head, rel=1e-6
    )


def test_full_checkpointing_computes_the_blocks_again(found):
    more = found["checkpointed"]["total"]["flops"] - found["plain"]["total"]["flops"]
    assert more == pytest.approx(found["plain"]["forward"], rel=0.1)
    assert more > 0.5 * found["plain"]["forward"]


def test_compiled_blocks_launch_less_and_move_less_than_eager_ones(found):
    plain, compiled = found["plain"], found["compiled"]
    assert compiled["num_kernels"] > plain["num_kernels"]
    for part in ("attention", "MLP"):
        for key in ("launches", "bytes"):
            assert 0 < compiled["parts"][part][key] < plain["parts"][part][key]
    assert compiled["total"]["flops"] == pytest.approx(plain["total"]["flops"], rel=1e-3)


def test_torchtitans_own_step_is_counted_beside_ours(found):
    if "torchtitan" not in found:
        pytest.skip("torchtitan's trainer is another one since 0.3")
    ours, titan = found["compiled"], found["torchtitan"]
    assert titan["num_kernels"] > 0
    assert titan["total"]["flops"] == pytest.approx(ours["total"]["flops"], rel=0.1)
    assert titan["total"]["bytes"] < 2 * ours["total"]["bytes"]


def test_a_step_waits_once_and_every_further_wait_is_found(found):
    (line,) = found["plain"]["waits"]
    assert "loss_metrics.py" in line and found["plain"]["waits"][line] == 1
    more = {k: n for k, n in found["waiting"]["waits"].items() if k != line}
    assert list(more.values()) == [1] and "item" in next(iter(more))


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
