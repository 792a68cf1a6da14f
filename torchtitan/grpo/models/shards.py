# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes which part of which parameter every rank holds.

In any layout, with any parallelisms, each rank holds at most one block of a parameter. The blocks
of a parameter are disjoint and cover it. Each block is sent once, by the lowest rank that holds it
unless the caller chooses another. Parameters have the order of the whole model.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

# Modules of a decoder, in order; a pipeline stage holds a contiguous part of them.
_TOP_LEVEL = ("tok_embeddings", "layers", "norm", "output")


@dataclass(frozen=True)
class Block:
    """A rectangular part of a tensor: its first element's index, and its size, in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))]


def block_of(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Block:
    """Returns the block of a sharded or replicated tensor at one coordinate of a mesh.

    Torch's helpers treat a strided shard as if the mesh axes had divided the tensor from left
    to right, which is wrong for FSDP2 if sizes do not divide evenly: FSDP2 divides last,
    although its axis is to the left, and marks its shard as strided where the order matters.
    """
    offset, size = [0] * len(shape), list(shape)
    strided = [axis for axis, p in enumerate(placements) if isinstance(p, _StridedShard)]
    others = [axis for axis in range(len(placements)) if axis not in strided]
    for axis in [*others, *reversed(strided)]:
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise ValueError(f"Weights must be sharded or replicated, got {placements}.")
        # As torch.chunk divides: parts are equal, except for the last ones.
        dim = placement.dim
        part = -(-size[dim] // mesh_shape[axis])
        begin = min(coordinate[axis] * part, size[dim])
        offset[dim] += begin
        size[dim] = min(part, size[dim] - begin)
    return Block(tuple(offset), tuple(size))


def named_parameters(model_parts: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each parameter with its upstream name. A parameter shared by modules is yielded once."""
    for part in model_parts:
        for name, parameter in part.named_parameters():
            # Activation checkpointing and torch.compile wrap modules, which shows in names.
            yield (
                name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""),
                parameter,
            )


def local_block(parameter: torch.Tensor) -> Block:
    if not isinstance(parameter, DTensor):
        return Block((0,) * parameter.ndim, tuple(parameter.shape))
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank holds a parameter of a mesh it is not in"
    block = block_of(parameter.shape, parameter.placements, mesh.shape, coordinate)
    local = tuple(parameter.to_local().shape)
    # Torch may set the other sizes of an empty part to 0 as well.
    assert block.shape == local or block.numel == 0 == math.prod(local), (block, local)
    return block


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's elements of a parameter, as a detached tensor that shares its memory."""
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's elements of a parameter. Their gradient flows into the parameter's local gradient."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def summed_part(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a replicated parameter's local tensor, whose gradients are summed over the mesh's ranks."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)


def divided_like(weight: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Makes ``local`` this rank's shard of a DTensor like ``weight``; unchanged if ``weight`` is no DTensor."""
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False,
        shape=weight.shape, stride=weight.stride(),
    )  # fmt: skip


@dataclass(frozen=True)
class Held:
    shape: tuple[int, ...]
    block: Block


@dataclass(frozen=True)
class Piece:
    """A block, the rank that sends it, and the other ranks that hold it, ascending."""

    rank: int
    block: Block
    replicas: tuple[int, ...] = ()

    @property
    def holders(self) -> tuple[int, ...]:
        return tuple(sorted((self.rank, *self.replicas)))

    def sent_by(self, rank: int) -> "Piece":
        return Piece(rank, self.block, tuple(r for r in self.holders if r != rank))


@dataclass(frozen=True)
class Assembly:
    """The blocks, none of them empty, that make up a whole parameter."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def plan_assembly(held_by_rank: Sequence[Mapping[str, Held]]) -> list[Assembly]:
    """Decides which rank sends which block. Raises RuntimeError if the blocks do not cover a parameter."""
    shapes: dict[str, tuple[int, ...]] = {}
    holders: dict[str, dict[Block, list[int]]] = {}
    for rank, held in enumerate(held_by_rank):
        for name, part in held.items():
            if shapes.setdefault(name, part.shape) != part.shape:
                raise RuntimeError(
                    f"All ranks must agree on the shape of {name}, got {shapes[name]} and, on rank "
                    f"{rank}, {part.shape}. Start all ranks with the same configuration."
                )
            blocks = holders.setdefault(name, {})
            if part.block.numel:
                blocks.setdefault(part.block, []).append(rank)
    for name, blocks in holders.items():
        covered = sum(block.numel for block in blocks)
        if covered != math.prod(shapes[name]):
            raise RuntimeError(
                f"The shards of {name} must cover its shape {shapes[name]}, got {covered} "
                f"elements in {blocks}. This layout is not supported."
            )
    return [
        Assembly(
            name,
            shapes[name],
            tuple(
                Piece(ranks[0], block, tuple(ranks[1:])) for block, ranks in holders[name].items()
            ),
        )
        for name in sorted(shapes, key=model_order)
    ]


def model_order(name: str) -> tuple[int, int]:
    """Sort key that puts native parameter names in the model's order of layers; equal within one layer."""
    top, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    place = _TOP_LEVEL.index(top) if top in _TOP_LEVEL else len(_TOP_LEVEL)
    return place, int(number) if number.isdecimal() else 0


def in_buckets(
    assemblies: Sequence[Assembly], num_bytes: Callable[[Assembly], int], bucket_bytes: int
) -> list[list[Assembly]]:
    """Groups parameters into buckets of at most ``bucket_bytes`` each, or of one larger parameter.

    A parameter of 0 bytes, such as that of an added adapter, joins the bucket of the previous one.
    """
    buckets: list[list[Assembly]] = []
    room = 0
    for assembly in assemblies:
        size = num_bytes(assembly)
        if not buckets or size > max(room, 0):
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(assembly)
        room -= size
    return buckets
