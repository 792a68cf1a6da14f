# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Turns a table of passes into the actions that torch's pipeline runtime runs.

NCCL runs all exchanges of a rank in the order in which they were queued. An exchange queued before
its tensor is ready delays those behind it, and ranks with different orders deadlock. All ranks
therefore queue exchanges in the order in which their tensors become ready in the simulation.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    _Action,
    _add_reduce_grad,
    _add_unshard_reshard,
    _ComputationType,
)

from torchtitan.grpo.pipeline.tables.actions import Action, Table
from torchtitan.grpo.pipeline.tables.simulate import Simulation

_KINDS: dict[str, _ComputationType] = {
    "F": FORWARD,
    "I": BACKWARD_INPUT,
    "W": BACKWARD_WEIGHT,
    "B": FULL_BACKWARD,
    "G": FORWARD,
}
# From release 2.15 on, torch's runtime demands that each exchange that sends is waited for.
_WAITS: dict[_ComputationType, _ComputationType] = {
    send: getattr(torch_schedules, f"WAIT_{send.name}")
    for send in (SEND_F, SEND_B)
    if hasattr(torch_schedules, f"WAIT_{send.name}")
}


@dataclass(frozen=True)
class GapNumbers:
    """The offset of stage numbers for a gap microbatch, and whether it uses the trained stages' weights."""

    offset: int
    shares_weights: bool


def lower(
    table: Table,
    simulation: Simulation,
    gaps: Sequence[GapNumbers] = (),
    offsets: Sequence[int] = (0,),
    *,
    has_collectives: bool = True,
) -> dict[int, list[_Action]]:
    """Returns each rank's actions, with exchanges of tensors and with FSDP's collectives.

    ``gaps`` has an entry for each microbatch in a gap. These are numbered after the other microbatches.
    ``offsets`` are the numbers of the first stages of the models that are trained. Without
    ``has_collectives``, FSDP's collectives are left to whoever runs the actions.
    """

    def numbered(action: Action, kind: _ComputationType) -> _Action:
        stage, microbatch = action.stage, action.microbatch
        if action.kind != "G":
            stage = table.number(stage, offsets)
        else:
            stage += gaps[microbatch].offset
            microbatch += table.num_microbatches
        return _Action(stage, kind, microbatch)

    queues: list[list[tuple[float, _Action]]] = [[] for _ in table.actions]
    for ready, sender, receiver in exchanges(table, simulation):
        send, recv = (SEND_F, RECV_F) if sender.kind in ("F", "G") else (SEND_B, RECV_B)
        for action, kind in ((sender, send), (receiver, recv)):
            queues[table.rank(action)].append((ready, numbered(action, kind)))
    lowered = {}
    for rank, actions in enumerate(table.actions):
        passes = {numbered(action, _KINDS[action.kind]): action for action in actions}
        following: Sequence[_Action | None] = list(passes)
        if has_collectives:
            gathered = _with_gathers(passes, gaps, keeps_all=len(table.first_stages) > 1)
            following = _add_reduce_grad(gathered, table.num_microbatches)
        lowered[rank] = _with_exchanges(following, passes, queues[rank], simulation)
    return lowered


def exchanges(table: Table, simulation: Simulation) -> list[tuple[float, Action, Action]]:
    """Returns each tensor's ready time, sender and receiver, in the order in which ranks queue them."""
    found = []
    for receiver in simulation.ends:
        for alternatives in receiver.after(table):
            sender = next(a for a in alternatives if a in simulation.ends)
            if table.rank(sender) != table.rank(receiver):
                found.append((simulation.ends[sender], sender, receiver))
    return sorted(found)


def _with_gathers(
    passes: dict[_Action, Action], gaps: Sequence[GapNumbers], *, keeps_all: bool
) -> list[_Action | None]:
    of_holders: list[_Action | None] = []
    for number, action in passes.items():
        # Parameters that two stages share are gathered once, for the trained stage.
        is_shared = action.kind == "G" and gaps[action.microbatch].shares_weights
        of_holders.append(number._replace(stage_index=action.stage) if is_shared else number)
    if gaps or keeps_all:
        num_holders = len({each.stage_index for each in of_holders if each is not None})
        gathered = _add_unshard_reshard(of_holders, num_holders)
    else:
        gathered = _add_unshard_reshard(of_holders)
    remaining = iter(passes)
    collectives = (UNSHARD, RESHARD)
    return [
        action if action.computation_type in collectives else next(remaining) for action in gathered
    ]


def _with_exchanges(
    actions: Sequence[_Action | None],
    passes: dict[_Action, Action],
    queue: list[tuple[float, _Action]],
    simulation: Simulation,
) -> list[_Action]:
    lowered: list[_Action] = []
    waiting = deque(queue)
    # A backward pass that recomputes blocks starts before its gradient arrives.
    kinds = {RECV_F: (FORWARD,), RECV_B: (BACKWARD_INPUT, FULL_BACKWARD)}
    arrivals = {
        exchange._replace(computation_type=kind): ready
        for ready, exchange in queue
        for kind in kinds.get(exchange.computation_type, ())
    }

    def queue_until(time: float) -> None:
        while waiting and waiting[0][0] <= time:
            exchange = waiting.popleft()[1]
            lowered.append(exchange)
            if exchange.computation_type in _WAITS:
                # `LeanStage` sends by itself and leaves the runtime nothing to wait for.
                wait = _WAITS[exchange.computation_type]
                lowered.append(exchange._replace(computation_type=wait))

    for action in actions:
        assert action is not None
        if action in passes:
            queue_until(max(simulation.starts[passes[action]], arrivals.get(action, 0.0)))
        lowered.append(action)
        if action in passes:
            queue_until(simulation.ends[passes[action]])
    assert not waiting, f"a rank would never exchange {waiting}"
    return lowered
