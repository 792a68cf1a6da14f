"""Trains with Muon and AdamW under FSDP2, and lends the ranks' devices between two steps."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from between_microbatches import state_of
from muon_ranks import Training
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan.grpo.data.feed import Feed, RankZeroFailed, Signal, TrainBatch
from torchtitan.grpo.models.shards import local_tensor
from torchtitan.grpo.training.loan import Copies, CudaMemory, Loan, LoanFailed, Room


class SecondMemory(CudaMemory):
    """Stands for a GPU's host memory; copies back have no effect until they are awaited."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_hosts = self._num_bytes = 0
        self._pending: Copies = []

    def host_like(self, state: torch.Tensor) -> torch.Tensor:
        self.num_hosts += 1
        return torch.empty_like(state)

    def state_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.full_like(host, torch.nan)

    def copy_out(self, copies: Copies) -> None:
        self.calls.append("out")
        self._num_bytes += sum(local_tensor(state).nbytes for _, state in copies)
        _copy(copies)

    def start_copies_back(self, copies: Copies) -> None:
        self.calls.append("back")
        self._pending = copies

    def await_copies(self) -> None:
        _copy(self._pending)
        self._pending = []

    def take_copy_seconds(self) -> float:
        return 0.0

    def release(self) -> int:
        """Tells the states, of which a GPU would be told beside what was freed."""
        self.calls.append("release")
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes


def _copy(copies: Copies) -> None:
    for target, source in copies:
        local_tensor(target).copy_(local_tensor(source))


def tensors_of(training: Training) -> dict[str, torch.Tensor]:
    state = training.state()
    found = {n: t for n, t in state["optimizer"].items() if isinstance(t, torch.Tensor)}
    return {n: local_tensor(t).clone() for n, t in (found | state["model"]).items()}


def are_equal(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == others.keys() and all(torch.equal(t, others[n]) for n, t in ours.items())


def states_of(training: Training) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a parameter and one of its states, without counts of steps."""
    return [
        (parameter, state)
        for optimizer in training.optimizers
        for parameter, states in optimizer.state.items()
        for state in states.values()
        if state.ndim > 0
    ]


def exchanged(training: Training, room: Room, memory: SecondMemory) -> dict[str, Any]:
    """Gives and takes on one rank."""
    (part,), before, states = training.built.parts, tensors_of(training), states_of(training)
    gradients = [p.grad for p in part.parameters() if p.grad is not None]
    expected = sum(local_tensor(state).nbytes for _, state in states)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    result: dict[str, Any] = {
        "num_gradients": len(gradients),
        "sharded": all(isinstance(state, DTensor) for _, state in states),
        "gathered_before": state_of(part)["gathered"],
        "given": room.give(),
        "expected": expected,
        "gathered": state_of(part)["gathered"],
        "gradients_left": sum(p.grad is not None for p in part.parameters()),
        "given_again": room.give(),
        "readable_while_given": are_equal(tensors_of(training), before),
    }
    room.reclaim()
    result["usable_too_early"] = are_equal(tensors_of(training), before)
    room.finish_reclaim()
    room.reclaim()
    room.finish_reclaim()
    result["bits_are_the_same"] = are_equal(tensors_of(training), before)
    room.give()
    room.reclaim()
    room.give()  # although the copies back were not awaited
    result["safe_in_between"] = are_equal(tensors_of(training), before)
    room.reclaim()
    room.finish_reclaim()
    return result | {
        "num_hosts": memory.num_hosts,
        "num_states": len(states),
        "calls": list(memory.calls),
    }


def lent(feed: Feed, training: Training, room: Room) -> dict[str, Any]:
    """Lends the devices of all ranks twice; the second time rank 1 has no host memory left."""
    calls = room._memory.calls  # pyright: ignore[reportAttributeAccessIssue]
    loan = Loan(feed, room, lambda: calls.append("staged"))
    training.optimizers.zero_grad()
    training.runner.forward_backward(training.rows, lambda output, _: output.sum())
    own = sum(local_tensor(state).nbytes for _, state in states_of(training))
    if feed.rank == 0:
        loan.make_room(1)
        loan.make_room(1)  # for a rollout process that was started again
        feed.send_signal(Signal.READY)
    else:
        assert loan.receive() is Signal.READY
    total = int(feed.all_reduce_sum(torch.tensor([own])))
    if feed.rank == 0:
        loan.on_batch()
    else:
        with mock.patch.object(feed, "receive", lambda: object.__new__(TrainBatch)):
            loan.receive()
    loan.before_step()
    metrics, later = loan.metrics(), loan.metrics()
    result = {"total": total, "metrics": metrics, "later": later, "error": "", "calls": calls[-6:]}
    if feed.rank == 1:

        def refuse() -> int:
            raise RuntimeError("no host memory is left")

        room.give = refuse  # pyright: ignore[reportAttributeAccessIssue]
    try:
        if feed.rank == 0:
            loan.make_room(1)
        else:
            loan.receive()
    except LoanFailed as error:
        feed.send_signal(Signal.FAIL)  # as `RankZeroTurn.releasing_others` does
        result["error"] = str(error)
    except RankZeroFailed:
        result["error"] = "rank 0 has failed"
    return result


def main(arguments: dict) -> dict:
    plain, lending = Training(arguments, {"dp_shard": 2}), Training(arguments, {"dp_shard": 2})
    memory = SecondMemory()
    room = Room(lending.built.parts, lending.optimizers.optimizers, memory, offloads=True)
    result: dict[str, Any] = {"before_the_first_step": room.give()}
    plain.step()
    lending.step()
    result |= exchanged(lending, room, memory)
    plain.step()
    lending.step()
    result["learns_the_same"] = are_equal(tensors_of(lending), tensors_of(plain))
    feed = Feed(dist.get_rank(), 12, timeout_seconds=60)
    result["lent"] = lent(feed, lending, room)
    dist.barrier()
    feed.close()
    return result
