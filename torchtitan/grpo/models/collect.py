# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Collects shards into whole parameters on one rank.

If several ranks hold the same block of a parameter, one of them sends it to the receiver. A sender
sends one message for each bucket. Only the receiver holds whole parameters.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.grpo.models.hf_names import StateDictAdapter
from torchtitan.grpo.models.shards import Assembly, Held, Piece, local_block, plan_assembly
from torchtitan.grpo.system.groups import new_group


def agree_on_assembly(
    parameters: Mapping[str, torch.Tensor], adapter: StateDictAdapter
) -> list[Assembly]:
    """Agrees with all ranks on how parameters are assembled. Raises RuntimeError if modules are missing.

    Collective over all ranks, on the training thread.
    """
    mine = {name: Held(tuple(p.shape), local_block(p)) for name, p in parameters.items()}
    held_by_rank: list[dict[str, Held]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(held_by_rank, mine)
    assemblies = plan_assembly(held_by_rank)
    check_whole([a.name for a in assemblies], getattr(adapter, "model_args"))  # noqa: B009
    return assemblies


def check_whole(names: Iterable[str], model_args: Any) -> None:
    wanted = {"tok_embeddings", "norm"} | {f"layers.{i}" for i in range(model_args.n_layers)}
    if not getattr(model_args, "enable_weight_tying", False):
        wanted.add("output")
    held = {module_of(name) for name in names}
    missing, unknown = sorted(wanted - held), sorted(held - wanted - {"output"})
    if missing or unknown:
        raise RuntimeError(
            f"All ranks together must hold each of the model's {model_args.n_layers} layers, its "
            f"embeddings, norm and output; missing are {missing}, unknown {unknown}. Check that "
            "parallelism.module_fqns_per_model_part names every module."
        )


def module_of(name: str) -> str:
    """Returns ``layers.3`` for ``layers.3.attention.wq.weight``, ``norm`` for ``norm.weight``."""
    top, _, rest = name.partition(".")
    return f"{top}.{rest.partition('.')[0]}" if top == "layers" else top


def collecting_group(
    members: Sequence[int], backend: str, timeout_seconds: float, device: torch.device
) -> dist.ProcessGroup | None:
    """Creates the group of a receiver and its senders, or returns None for one member. All ranks call it."""
    if len(members) == 1:
        return None
    group = new_group("grpo_gather", backend, timeout_seconds, members)
    if dist.get_rank() in members:
        # NCCL can send between two ranks only after a collective of the whole group.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


class Collector:
    """Collects parameters bucket by bucket; one bucket is in transit while another is assembled.

    Each rank constructs one with the same arguments, and iterates over :meth:`collect` to its end,
    in the same order as the other collectives on ``group`` (all ranks if None). The ranks
    ``in_place`` send only a notice: the receiver reads their shards from shared memory.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[Assembly]],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
        receiver: int = 0,
        in_place: Collection[int] = (),
    ) -> None:
        self._buckets, self._receiver = buckets, receiver
        self._in_place = sorted(in_place)
        self._dtype, self._device, self._group = dtype, device, group
        self._rank = dist.get_rank()

    @torch.no_grad()
    def collect(
        self,
        shards: Mapping[str, torch.Tensor],
        *,
        others: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
        places: Mapping[str, torch.Tensor] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and whole parameters on the receiver, and nothing on other ranks.

        A yielded tensor may share memory with ``shards``. ``others`` has the shards of the ranks
        ``in_place``, which must not change before the iteration ends. ``places`` has, by name, tensors
        in which parameters are assembled. They may already contain some blocks.
        """
        if self._rank == self._receiver:
            at_hand = {self._receiver: shards, **(others or {})}
            assert sorted(at_hand) == sorted([self._receiver, *self._in_place]), sorted(at_hand)
            yield from self._receive(at_hand, places or {})
        elif self._rank in self._in_place:
            _finish(self._transfer(dist.isend, {self._receiver: self._notice()}))
        else:
            self._send(shards)

    def _notice(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8, device=self._device)

    def _send(self, shards: Mapping[str, torch.Tensor]) -> None:
        under_way: deque[tuple[list[dist.Work], torch.Tensor]] = deque()
        for bucket in self._buckets:
            parts = [
                shards[assembly.name].to(self._dtype).reshape(-1)
                for assembly in bucket
                if any(piece.rank == self._rank for piece in assembly.pieces)
            ]
            if not parts:
                continue
            message = torch.cat(parts)
            under_way.append((self._transfer(dist.isend, {self._receiver: message}), message))
            if len(under_way) > 1:
                _finish(under_way.popleft()[0])
        for works, _ in under_way:
            _finish(works)

    def _receive(
        self,
        at_hand: Mapping[int, Mapping[str, torch.Tensor]],
        places: Mapping[str, torch.Tensor],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        notices = self._transfer(dist.irecv, {rank: self._notice() for rank in self._in_place})
        works, messages = self._expect(0)
        _finish(notices)
        for index, bucket in enumerate(self._buckets):
            after = self._expect(index + 1)
            _finish(works)
            read = dict.fromkeys(messages, 0)
            for assembly in bucket:
                place = places.get(assembly.name)
                yield assembly.name, self._assemble(assembly, at_hand, messages, read, place)
            works, messages = after

    def _expect(self, index: int) -> tuple[list[dist.Work], dict[int, torch.Tensor]]:
        sizes: dict[int, int] = {}
        for assembly in self._buckets[index] if index < len(self._buckets) else ():
            for piece in assembly.pieces:
                if piece.rank != self._receiver and piece.rank not in self._in_place:
                    sizes[piece.rank] = sizes.get(piece.rank, 0) + piece.block.numel
        messages = {
            rank: torch.empty(numel, dtype=self._dtype, device=self._device)
            for rank, numel in sizes.items()
        }
        return self._transfer(dist.irecv, messages), messages

    def _assemble(
        self,
        assembly: Assembly,
        at_hand: Mapping[int, Mapping[str, torch.Tensor]],
        messages: Mapping[int, torch.Tensor],
        read: dict[int, int],
        place: torch.Tensor | None,
    ) -> torch.Tensor:
        def take(piece: Piece) -> torch.Tensor:
            if piece.rank in at_hand:
                return at_hand[piece.rank][assembly.name].to(self._dtype)
            begin = read[piece.rank]
            read[piece.rank] = begin + piece.block.numel
            return messages[piece.rank][begin : read[piece.rank]].view(piece.block.shape)

        if len(assembly.pieces) == 1:
            return take(assembly.pieces[0])
        whole = place
        if whole is None:
            whole = torch.empty(assembly.shape, dtype=self._dtype, device=self._device)
        for piece in assembly.pieces:
            part, block = piece.block.of(whole), take(piece)
            if part.data_ptr() != block.data_ptr():  # otherwise it lies there already
                part.copy_(block)
        return whole

    def _transfer(self, operation, messages: Mapping[int, torch.Tensor]) -> list[dist.Work]:
        operations = [
            dist.P2POp(operation, message, peer, self._group) for peer, message in messages.items()
        ]
        return dist.batch_isend_irecv(operations) if operations else []


def _finish(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
