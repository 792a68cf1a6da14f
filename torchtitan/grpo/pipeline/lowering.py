# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Turns a table of passes into the actions that torch's pipeline runtime runs.

The runtime also needs to be told when ranks exchange tensors, and when FSDP gathers and reduces.
NCCL runs all exchanges of a rank in the order in which they were queued: an exchange that was queued
before its tensor is ready delays those behind it, and ranks that queue theirs in different orders
wait for each other for ever. Exchanges are therefore queued in one order on all ranks, that of the
times at which the simulator says that their tensors will be ready.
"""

from collections import deque
from typing import cast

from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    _Action,
    _add_reduce_grad,
    _add_unshard_reshard,
    _ComputationType,
)

from torchtitan.grpo.pipeline.simulate import Simulation
from torchtitan.grpo.pipeline.tables.actions import Action, Table

_KINDS: dict[str, _ComputationType] = {
    "F": FORWARD,
    "I": BACKWARD_INPUT,
    "W": BACKWARD_WEIGHT,
    "B": FULL_BACKWARD,
}


def lower(table: Table, simulation: Simulation) -> dict[int, list[_Action]]:
    """Returns each rank's actions, with exchanges of tensors and with FSDP's collectives.

    Args:
        table: The passes.
        simulation: What the simulator said about the table.
    """
    queues: list[list[tuple[float, _Action]]] = [[] for _ in table.actions]
    for ready, sender, receiver in exchanges(table, simulation):
        send, recv = (SEND_F, RECV_F) if sender.kind == "F" else (SEND_B, RECV_B)
        for action, kind in ((sender, send), (receiver, recv)):
            exchange = _Action(action.stage, kind, action.microbatch)
            queues[table.ranks[action.stage]].append((ready, exchange))
    return {
        rank: _with_exchanges(table, rank, queues[rank], simulation)
        for rank in range(table.num_ranks)
    }


def exchanges(table: Table, simulation: Simulation) -> list[tuple[float, Action, Action]]:
    """Returns when each tensor that changes ranks is ready, its sender, and its receiver.

    They are in the order in which all ranks queue them.
    """
    found = []
    for receiver in simulation.ends:
        for alternatives in receiver.after(table.num_stages):
            sender = next(a for a in alternatives if a in simulation.ends)
            if table.ranks[sender.stage] != table.ranks[receiver.stage]:
                found.append((simulation.ends[sender], sender, receiver))
    return sorted(found)


def _with_exchanges(
    table: Table, rank: int, queue: list[tuple[float, _Action]], simulation: Simulation
) -> list[_Action]:
    """Returns a rank's actions, with its exchanges when their tensors are ready."""
    passes = {
        _Action(action.stage, _KINDS[action.kind], action.microbatch): action
        for action in table.actions[rank]
    }
    gathered = cast(list[_Action | None], _add_unshard_reshard(list(passes)))
    lowered: list[_Action] = []
    waiting = deque(queue)

    def queue_until(time: float) -> None:
        while waiting and waiting[0][0] <= time:
            lowered.append(waiting.popleft()[1])

    for action in _add_reduce_grad(gathered, table.num_microbatches):
        assert action is not None
        if action in passes:
            queue_until(simulation.starts[passes[action]])
        lowered.append(action)
        if action in passes:
            queue_until(simulation.ends[passes[action]])
    assert not waiting, f"Rank {rank} would never exchange {waiting}."
    return lowered
