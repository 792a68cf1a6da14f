# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lends the devices of all training ranks to inference servers, and reclaims them.

Rank 0 announces a loan while it waits for the first part of a batch. The other ranks wait for that
batch in :meth:`Loan.receive`. Servers are woken only after all ranks have made room. The batch arrives
only once these servers sleep again. Devices are also lent before the first batch, while servers start
and evaluate, and after the last batch. They are never lent in the middle of a batch that arrives in
parts, because its gradient is incomplete then. The lender (`rollout/lending/lender.py`) decides which
servers wake and sleep.

A rank gives up gradients, parameters that FSDP2 has gathered, and memory that torch caches. With
``optimizer.offload_while_lent``, it moves optimizer states to pinned host memory. Parameters, the
reference model, and the memory pools of compiled code and CUDA graphs stay on the device.

The training loop calls :meth:`Loan.before_wait`, ``on_batch``, ``before_step`` and ``metrics``.
"""

import mmap
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan.grpo.config.cluster import count_servers, lent_groups, server_groups
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.feed import Feed, Signal, TrainBatch
from torchtitan.grpo.models.shards import local_tensor
from torchtitan.grpo.system.device import new_stream
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.host_memory import pin
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.learner import Learner
from torchtitan.grpo.training.reference import Reference

_WAIT_SECONDS = 120.0
# Interval at which the host polls a CUDA event, because waiting for an event has no timeout.
_POLL_SECONDS = 0.002

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a target and its source; each is a plain tensor or a DTensor."""


class CudaMemory:
    """Moves states between a GPU and its host. Copies back have their own stream, beside the forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._copied: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._timed: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def host_like(self, state: torch.Tensor) -> torch.Tensor:
        """Allocates a pinned host tensor with the shape and type of a state on the device."""
        host = torch.empty_like(state, device="cpu")
        local = host._local_tensor if isinstance(host, DTensor) else host
        if local.nbytes:
            # In pages of its own, because a page can be pinned only once. Not `pin_memory=True`, which
            # rounds each size up to a power of two.
            pages = torch.frombuffer(
                mmap.mmap(-1, local.untyped_storage().nbytes()), dtype=torch.uint8
            )
            local.set_(pages.untyped_storage(), 0, local.shape, local.stride())
            pin(
                [pages],
                purpose="the optimizer's states",
                remedy="set optimizer.offload_while_lent = false",
            )
        return host

    def state_like(self, host: torch.Tensor) -> torch.Tensor:
        """Allocates a device tensor with the shape and type of a state in host memory."""
        # Its memory belongs to the pool of the current stream, which also frees it.
        return torch.empty_like(host, device=self._device)

    @torch.no_grad()
    def copy_out(self, copies: Copies) -> None:
        """Copies states to host memory. Waits for the copies, so that the device's memory can be freed."""
        for host, state in copies:
            local_tensor(host).copy_(local_tensor(state), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        deadline = time.monotonic() + _WAIT_SECONDS
        while not copied.query():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "The optimizer's states must be in host memory within "
                    f"{_WAIT_SECONDS:g} s (optimizer.offload_while_lent), but their copy has not "
                    "ended, because earlier work of the training has not ended."
                )
            time.sleep(_POLL_SECONDS)

    @torch.no_grad()
    def start_copies_back(self, copies: Copies) -> None:
        """Starts to copy states to the device, without waiting."""
        if self._stream is None:
            self._stream = new_stream(self._device)
        # The new memory may have been used by earlier work of the training stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            before.record()
            for state, host in copies:
                local_tensor(state).copy_(local_tensor(host), non_blocking=True)
            after.record()
        self._copied = before, after

    def await_copies(self) -> None:
        """Makes later work on the device wait for the copies that were started. Does not block the host."""
        if self._copied is None:
            return
        torch.cuda.current_stream().wait_event(self._copied[1])
        self._timed, self._copied = self._copied, None

    def take_copy_seconds(self) -> float:
        """Returns how long the last copies back took, or 0 if they have not ended or were returned before."""
        if self._timed is None or not self._timed[1].query():
            return 0.0
        (before, after), self._timed = self._timed, None
        return before.elapsed_time(after) / 1e3

    def release(self) -> int:
        """Frees device memory that torch caches, and returns the number of bytes."""
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self._device)


class Room:
    """The memory that one rank gives up and reclaims, on the training thread.

    Call :meth:`give` only between batches, because it drops gradients. The other methods may be called
    at any time, and repeated calls have no further effect. States that were given up can still be
    read, for example for a checkpoint, because they are in host memory then.

    ``parts`` are all models on the device. ``memory`` is None on a CPU, where freed tensors return to
    the system, and states have nowhere to move to. ``offloads`` is ``optimizer.offload_while_lent``.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        memory: CudaMemory | None = None,
        *,
        offloads: bool = False,
    ) -> None:
        assert memory is not None or not offloads, "optimizer.offload_while_lent is refused on CPU"
        self._parameters = [p for part in parts for p in part.parameters()]
        self._sharded = [m for part in parts for m in part.modules() if isinstance(m, FSDPModule)]
        self._optimizers = list(optimizers)
        self._memory, self._offloads = memory, offloads
        # Host memory is made once. A state is known by its parameter and its name.
        self._hosts: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._given: set[tuple[torch.Tensor, str]] = set()

    def give(self) -> int:
        """Gives up memory. Returns the number of bytes that this call has freed.

        Raises TimeoutError if the copy to host memory does not end, and RuntimeError if host memory
        is short.
        """
        self.finish_reclaim()
        freed = 0
        for parameter in self._parameters:
            if parameter.grad is not None:
                freed += local_tensor(parameter.grad).nbytes
                parameter.grad = None
        for module in self._sharded:
            module.reshard()
        if self._memory is None:
            return freed
        if self._offloads:
            self._move_states_out(self._memory)
        return self._memory.release()

    def reclaim(self) -> None:
        """Starts to copy the optimizer's states back. They may be used after :meth:`finish_reclaim`."""
        if self._memory is None:
            return
        copies = []
        for states, parameter, name in self._states():
            if (parameter, name) in self._given:
                host = states[name]
                states[name] = self._memory.state_like(host)
                copies.append((states[name], host))
        self._given.clear()
        if copies:
            self._memory.start_copies_back(copies)

    def finish_reclaim(self) -> None:
        """Makes later work on the device, such as an optimizer step, wait for :meth:`reclaim`'s copies."""
        if self._memory is not None:
            self._memory.await_copies()

    def reclaim_seconds(self) -> float:
        """Returns how long the last reclaim's copies took, or 0 if that was returned before."""
        return 0.0 if self._memory is None else self._memory.take_copy_seconds()

    def _move_states_out(self, memory: CudaMemory) -> None:
        copies = []
        for states, parameter, name in self._states():
            key = (parameter, name)
            if key in self._given:
                continue
            if key not in self._hosts:
                self._hosts[key] = memory.host_like(states[name])
            copies.append((self._hosts[key], states[name]))
        if not copies:
            return
        memory.copy_out(copies)
        for states, parameter, name in self._states():
            states[name] = self._hosts[parameter, name]
            self._given.add((parameter, name))

    def _states(self) -> Iterable[tuple[dict[str, torch.Tensor], torch.Tensor, str]]:
        """Yields optimizer states except step counts, each as the dict that holds it, parameter and name."""
        for optimizer in self._optimizers:
            for parameter, states in optimizer.state.items():
                for name, state in states.items():
                    if isinstance(state, torch.Tensor) and state.ndim > 0:
                        yield states, parameter, name


class LoanFailed(RunError):
    """Some ranks could not make room for lent servers on their devices."""


class Loan:
    """Lends this rank's device together with those of all other ranks, on the training thread.

    Without a ``room``, nothing is lent or announced. ``await_staging`` waits until no checkpoint copies
    the states that the room moves.

    Attributes:
        until: On rank 0, the version whose batch ends the loan. None while nothing is lent.
        notify: Called on rank 0 with this version once servers may use the devices.
    """

    def __init__(
        self, feed: Feed, room: Room | None = None, await_staging: Callable[[], None] = lambda: None
    ) -> None:
        self._feed, self._room, self._await_staging = feed, room, await_staging
        self._num_bytes = self._seconds = 0.0
        self.until: int | None = None
        self.notify: Callable[[int], None] = lambda version: None

    def before_wait(self, version: int) -> None:
        """Lends the devices of all ranks until the batch of ``version``; see :meth:`make_room`."""
        self.make_room(version)
        self.tell()

    def make_room(self, version: int) -> None:
        """Makes room on all ranks, while the others wait in :meth:`receive`. Called on rank 0.

        Raises LoanFailed with the ranks that could not, and why.
        """
        if self._room is not None:
            self._feed.send_signal(Signal.LEND)
            self._give(self._room)
            self.until = version

    def tell(self) -> None:
        """Tells the rollout process of the loan, if any. Called again if that process is restarted."""
        if self.until is not None:
            self.notify(self.until)

    def _give(self, room: Room) -> None:
        begin, error = time.perf_counter(), None
        given = torch.zeros(2, dtype=torch.float64)  # bytes, and the number of ranks that failed
        try:
            self._await_staging()
            given[0] = room.give()
        except Exception as failure:  # rank 0 raises it below, once all ranks are here
            error, given[1] = failure, 1.0
        # No server may be woken before all ranks are here.
        num_bytes, num_failed = self._feed.all_reduce_sum(given).tolist()
        if num_failed:
            self._report(error)
        self._num_bytes += num_bytes
        self._seconds += time.perf_counter() - begin

    def _report(self, error: Exception | None) -> None:
        """Collects all ranks' errors and raises LoanFailed on rank 0, whose next message informs the others."""
        problems: list[str | None] = [None] * dist.get_world_size()
        text = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(problems, text, group=self._feed.group)
        if self._feed.rank == 0:
            failed = [f"rank {rank}: {what}" for rank, what in enumerate(problems) if what]
            raise LoanFailed(
                "All ranks must make room on their devices for lent servers, but "
                f"{len(failed)} of {len(problems)} could not. " + "; ".join(failed)
            ) from error

    def receive(self) -> TrainBatch | Signal:
        """Waits, on ranks other than 0, for rank 0's next message. Makes room whenever it announces a loan."""
        while (received := self._feed.receive()) is Signal.LEND:
            assert self._room is not None, "rank 0 lends, and so do all ranks of the run"
            self._give(self._room)
        if isinstance(received, TrainBatch):
            self.on_batch()
        return received

    def on_batch(self) -> None:
        """Begins to reclaim the device, once a batch has arrived."""
        self.until = None
        if self._room is not None:
            self._room.reclaim()

    def before_step(self) -> None:
        """Makes later work on the device wait for what :meth:`on_batch` has begun to reclaim."""
        if self._room is not None:
            self._room.finish_reclaim()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call: bytes over all ranks, and seconds of this rank."""
        if self._room is None:
            return {}
        metrics = {
            "lend/room_bytes": self._num_bytes,
            "lend/room_give_seconds": self._seconds,
            "lend/room_take_seconds": self._room.reclaim_seconds(),
        }
        self._num_bytes = self._seconds = 0.0
        return metrics


def build_loan(trainer: Trainer, feed: Feed, learner: Learner) -> Loan:
    config: JobConfig = trainer.job_config  # pyright: ignore[reportAssignmentType]
    if not config.lends_devices:
        return Loan(feed)
    if feed.rank == 0:
        logger.info(
            f"While ranks wait for rollouts, {count_servers(lent_groups(config))} of "
            f"{count_servers(server_groups(config))} servers use their devices, if that is faster"
        )
    reference = learner.scorer.reference
    parts = [part for trainee in learner.trainees for part in trainee.parts]
    parts += reference.parts if isinstance(reference, Reference) else []
    optimizers = [o for trainee in learner.trainees for o in trainee.optimizers.optimizers]
    offloads = config.optimizer.offload_while_lent
    memory = CudaMemory(trainer.device) if trainer.device.type == "cuda" else None
    room = Room(parts, optimizers, memory, offloads=offloads)
    return Loan(feed, room, trainer.checkpointer.maybe_wait_for_staging)
