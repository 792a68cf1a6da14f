# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ranks exchange tensors in one order, and never deadlock."""

from dataclasses import replace

import pytest

from torchtitan.grpo.pipeline.lowering import lower
from torchtitan.grpo.pipeline.schedules import LAYER_SCHEDULES, SCHEDULES
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.pipeline.tables.simulate import simulate

SENDS, RECEIVES = ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")
WAITS = ("WAIT_SEND_F", "WAIT_SEND_B")  # from torch 2.15 on


def lowered(name: str, degree: int, microbatches: int, recompute=0.0):
    row = SCHEDULES[name]
    costs = Costs.uniform(degree, row.stages_per_rank, (3, 4, 2), hop=0.5)
    stages = (replace(s, recompute=recompute * s.input_grad) for s in costs.stages)
    costs = replace(costs, stages=tuple(stages))
    table = row.make_table(degree, microbatches, costs)
    return table, lower(table, simulate(table, costs))


def exchange(action) -> tuple[int, str, int]:
    """The stage that sends, the direction, and the microbatch of a send or a receive."""
    kind, direction = action.computation_type.name.split("_")
    sender = action.stage_index + (0 if kind == "SEND" else -1 if direction == "F" else 1)
    return sender, direction, action.microbatch_index


@pytest.mark.parametrize("recompute", [0.0, 0.5])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", LAYER_SCHEDULES)
def test_exchanges_that_block_their_rank_until_they_are_done_finish(name, degree, recompute):
    """The hardest case: a rank waits in each exchange for the other side, as on one NCCL stream."""
    _, actions = lowered(name, degree, 2 * degree + 1, recompute)
    queues = {
        rank: [exchange(a) for a in todo if a.computation_type.name in SENDS + RECEIVES]
        for rank, todo in actions.items()
    }
    while any(queues.values()):
        heads = [queue[0] for queue in queues.values() if queue]
        done = next((head for head in heads if heads.count(head) == 2), None)
        assert done is not None, f"All ranks wait: {heads}"
        for queue in queues.values():
            if queue and queue[0] == done:
                queue.pop(0)


@pytest.mark.parametrize("recompute", [0.0, 0.5])
@pytest.mark.parametrize("name", LAYER_SCHEDULES)
def test_an_input_comes_before_its_pass_and_an_output_leaves_before_the_next_pass(name, recompute):
    _, actions = lowered(name, 4, 9, recompute)
    for todo in actions.values():
        assert len(set(todo)) == len(todo)
        running, received, num_exchanges = None, set(), 0
        for action in todo:
            kind, key = action.computation_type.name, (action.stage_index, action.microbatch_index)
            if kind in SENDS:
                assert running == ("F" if kind == "SEND_F" else "B", *key)
            elif kind in RECEIVES:
                received.add((kind[-1], *key))
            elif key[1] is not None and kind not in ("BACKWARD_WEIGHT", *WAITS):
                running = ("F" if kind == "FORWARD" else "B", *key)
                # A first stage's F, a last stage's B, and neighbors on one rank receive nothing.
                received.discard(running)
            num_exchanges += kind in SENDS + RECEIVES
        assert received == set() and num_exchanges > 0


def test_fsdp_gathers_each_stage_once_and_reduces_it_after_its_last_weight_gradient():
    _, actions = lowered("VHalf", 2, 4)
    for rank, stages in enumerate(((0, 3), (1, 2))):
        names = [str(action) for action in actions[rank]]
        for stage in stages:
            assert names.count(f"{stage}UNSHARD") == names.count(f"{stage}RESHARD") == 1
            reduced = names.index(f"{stage}REDUCE_GRAD")
            assert max(names.index(f"{stage}W{i}") for i in range(4)) < reduced
