# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""HelixPipe computes what plain accumulation does, wherever its attention is."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from torchtitan.grpo.config.frame import Parallelism
from torchtitan.grpo.models.blocks.parts import (
    GatedFeedForward,
    GroupedAttention,
    Layer,
    Layers,
    RoutedExperts,
)
from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.pipeline.choice import assumed_part_costs
from torchtitan.grpo.pipeline.helix_limits import helix_model_problems
from torchtitan.grpo.pipeline.lowering import lower
from torchtitan.grpo.pipeline.stages import rank_of_parameter, stage_modules, stage_ranks
from torchtitan.grpo.pipeline.tables.actions import Action, Table
from torchtitan.grpo.pipeline.tables.helix import helix, part_costs
from torchtitan.grpo.pipeline.tables.simulate import simulate

SIZES = [(2, 3, 1), (2, 4, 5), (3, 2, 4), (4, 8, 8), (4, 5, 11)]
"""Numbers of ranks, layers and microbatches."""


def costs_of(num_layers: int, **more):
    return part_costs(num_layers, (1.0, 2.0), (1.5, 3.5), hop=0.1, **more)


@pytest.mark.parametrize(("num_ranks", "num_layers", "count"), SIZES)
def test_attention_goes_round_the_ranks_and_the_rest_of_a_layer_stays(num_ranks, num_layers, count):
    costs = costs_of(num_layers)
    table = helix(num_ranks, count, costs)
    simulate(table, costs)
    simulate(helix(num_ranks, count, costs, is_forward_only=True), costs)
    for stage in range(2 * num_layers + 1):
        ranks = [table.rank(Action(stage, "F", microbatch)) for microbatch in range(count)]
        if stage % 2:
            assert len(set(ranks)) == min(num_ranks, count)
        else:
            assert set(ranks) == {stage // 2 % num_ranks}


@pytest.mark.parametrize(("num_ranks", "num_layers", "count"), SIZES)
def test_few_microbatches_are_under_way_and_one_has_logits(num_ranks, num_layers, count):
    table = helix(num_ranks, count, costs_of(num_layers))
    of_last = [a for a in table.actions[table.ranks[-1]] if a.stage == 2 * num_layers]
    assert [a.kind for a in of_last] == ["F", "B"] * count
    under_way = most = 0
    for action in table.actions[0]:
        if action.stage == 0:
            under_way += 1 if action.kind == "F" else -1
            most = max(most, under_way)
    assert most <= 2 * num_ranks


@pytest.mark.parametrize(("num_ranks", "num_layers", "count"), SIZES)
def test_ranks_that_wait_in_each_exchange_for_the_other_side_finish(num_ranks, num_layers, count):
    costs = costs_of(num_layers)
    table = helix(num_ranks, count, costs)
    queues = []
    for actions in lower(table, simulate(table, costs), has_collectives=False).values():
        queue = []
        for action in actions:
            kind, _, direction = action.computation_type.name.rpartition("_")
            if kind in ("SEND", "RECV"):
                step = (1 if direction == "F" else -1) * (kind == "RECV")
                queue.append((action.stage_index - step, direction, action.microbatch_index))
        queues.append(queue)
    assert set(Counter(exchange for queue in queues for exchange in queue).values()) == {2}
    while any(queues):
        heads = [queue[0] for queue in queues if queue]
        done = next((head for head in heads if heads.count(head) == 2), None)
        assert done is not None, f"All ranks wait: {heads}"
        for queue in queues:
            if queue and queue[0] == done:
                queue.pop(0)


def test_long_rows_leave_little_idle_time():
    """Of two microbatches a rank, with attention that takes longer than everything else."""
    costs = part_costs(32, (1.0, 2.0), (1.7, 4.2), hop=0.02)
    assert simulate(helix(4, 8, costs), costs).bubble < 0.04


def test_what_attention_returns_on_its_own_rank_is_in_memory_once():
    stages = costs_of(1, kept=(2.0, 4.0), shared=1.0)
    order = ((0, "F"), (1, "F"), (2, "F"), (2, "B"), (1, "B"), (0, "B"))
    here = Table((0, 0, 0), 1, (tuple(Action(s, k, 0) for s, k in order),))  # pyright: ignore
    assert simulate(here, stages).peaks == (5.0,)
    apart = Table(
        (0, 1, 0), 1, tuple(
            tuple(Action(s, k, 0) for s, k in order if s % 2 == odd) for odd in (0, 1)
        ),
    )  # fmt: skip  # pyright: ignore
    assert simulate(apart, stages).peaks == (2.0, 4.0)


def settings_of(degree: int, **more) -> Parallelism:
    return Parallelism(pipeline_parallel_degree=degree, pipeline_parallel_schedule="Helix", **more)


def test_the_weights_of_a_layer_are_on_two_ranks():
    rank_of = rank_of_parameter(settings_of(2), 3)
    expected = {
        "tok_embeddings.weight": 0, "layers.0.attention.wq.weight": 0,
        "layers.0.attention_norm.weight": 0, "layers.0.attention.wo.weight": 1,
        "layers.0.feed_forward.w1.weight": 1, "layers.1.attention.k_norm.weight": 1,
        "layers.2.feed_forward.w2.weight": 1, "norm.weight": 1, "output.weight": 1,
    }  # fmt: skip
    assert {name: rank_of(name) for name in expected} == expected
    assert stage_ranks(settings_of(2), len(stage_modules(settings_of(2), 3))) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("degree", "more", "message"),
    [
        (5, {}, "3 layers into 4 parts .* at least as many as the 5 ranks"),
        (2, {"pipeline_parallel_layers_per_stage": 1}, "layers_per_stage must be left out"),
        (2, {"module_fqns_per_model_part": [["norm"]]}, "module_fqns_per_model_part must be left"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(degree, more, message):
    with pytest.raises(ValueError, match=message):
        stage_modules(settings_of(degree, **more), 3)


DENSE = Layer(GroupedAttention(64, 4, 2, 16), GatedFeedForward(64, 160))
EXPERTS = replace(DENSE, feed_forward=RoutedExperts(64, 160, num_experts=4, top_k=2))
WINDOWED = replace(DENSE, attention=replace(DENSE.attention, window=8))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([DENSE, EXPERTS], "my/model has experts"),
        ([DENSE, WINDOWED], "layers are of one kind, and my/model has 2"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(layers, message):
    (problem,) = helix_model_problems(DecoderArgs(layers=Layers.of(layers)), "my/model")
    assert message in problem
    assert not [*helix_model_problems(DecoderArgs(layers=Layers.of([DENSE] * 2)), "my/model")]


def test_assumed_costs_grow_with_the_length_of_rows():
    args = DecoderArgs(dim=64, layers=Layers.of([DENSE] * 2))
    parallelism = SimpleNamespace(
        pipeline_parallel_degree=2, context_parallel_degree=1, tensor_parallel_degree=1
    )

    def costs(seq_len: int, mode: str):
        config = SimpleNamespace(
            training=SimpleNamespace(seq_len=seq_len), parallelism=parallelism,
            activation_checkpoint=SimpleNamespace(mode=mode),
        )  # fmt: skip
        return assumed_part_costs(config, args)  # pyright: ignore[reportArgumentType]

    short, long = costs(100, "full"), costs(1000, "full")
    assert len(short.stages) == 5
    assert long.stages[1].forward == 10 * short.stages[1].forward
    assert long.stages[2] == short.stages[2]
    # The residual stream and the output of attention; and queries, keys, values and the output.
    assert [stage.activation for stage in short.stages] == [0, 3, 2, 3, 2]
    assert short.stages[2].recompute > 0 == costs(100, "none").stages[2].recompute


SEQUENCES = [
    [5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7], [3, 1, 4, 1, 5],
    [5, 7, 1, 8, 2, 8], [1, 6, 1, 8], [0, 5, 7, 7, 2, 1], [31, 4, 15], [9, 26, 5, 35],
]  # fmt: skip


def rows(count: int) -> list[list[int]]:
    """Packs the sequences into rows of at most two; some of these share their first token."""
    return [[i, i + count] if i + count < len(SEQUENCES) else [i] for i in range(count)]


FULL = {"ac": "full"}
LAYOUTS = {
    "two ranks": (2, "qwen3", [
        {"pp": 2, "rows": rows(5)},
        {"pp": 2, "rows": rows(6), "chunk_tokens": 5} | FULL,
    ]),
    "two ranks, more": (2, "qwen3", [
        {"pp": 2, "rows": rows(8)} | FULL,
        {"pp": 2, "rows": rows(1)} | FULL,
    ]),
    "four ranks": (4, "llama", [
        {"pp": 4, "rows": rows(8)} | FULL,
        {"pp": 2, "dp_shard": 2, "rows": rows(5)} | FULL,
        {"pp": 2, "tp": 2, "rows": rows(5)} | FULL,
        {"pp": 2, "cp": 2, "rows": rows(5), "chunk_tokens": 4} | FULL,
    ]),
    "four ranks, more": (4, "llama", [
        {"pp": 4, "rows": rows(3)},
        {"pp": 2, "dp_replicate": 2, "rows": rows(6)},
        {"pp": 2, "dp_shard": 2, "rows": rows(6)},
    ]),
    "tied embeddings": (2, "qwen2_tied", [{"pp": 2, "rows": rows(5)} | FULL]),
}  # fmt: skip
"""By name: the number of ranks, the kind of model, and layouts."""
ALWAYS = ("two ranks", "four ranks")


@pytest.mark.parametrize(
    "name",
    [
        # The others repeat the comparison in further layouts.
        pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long)
        for name in LAYOUTS
    ],
)
def test_gradients_and_losses_are_those_of_plain_accumulation(name, make_model, run_ranks):
    num_ranks, kind, layouts = LAYOUTS[name]
    _, folder = make_model(kind, intermediate_size=78)
    results = run_ranks(
        "helix_layouts", num_ranks, model=folder, seq_len=16, sequences=SEQUENCES,
        sharing=[0] * len(SEQUENCES), layouts=layouts,
    )  # fmt: skip
    for number in range(len(layouts)):
        of_ranks = [result["results"][number] for result in results]
        names = {name for found in of_ranks for name in found["names"]}
        assert names == set(of_ranks[0]["all_names"])
        assert any(found["num_losses"] for found in of_ranks)
        for found in of_ranks:
            for figure in ("gradients", "norm", "losses", "outputs"):
                assert found[figure] < 1e-6, (number, figure, found[figure])
