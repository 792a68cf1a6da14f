# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which part of which parameter every rank holds.

Pure: any layout (FSDP2, replication, tensor, context, expert and pipeline parallelism, and
their products) comes down to one block of a parameter on each rank that holds it. Whoever
reads or writes weights needs to know nothing else. Invariants of the plan:

- The blocks of a parameter are disjoint and cover it.
- Each block is sent once, by the lowest of the ranks that hold it.
- Parameters come in the order in which the whole model has them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

# How torchtitan's decoders are built up; pipeline stages hold a contiguous part of it.
_TOP_LEVEL = ("tok_embeddings", "layers", "norm", "output")


@dataclass(frozen=True)
class Block:
    """A rectangular part of a tensor.

    Attributes:
        offset: Of its first element, in each dimension.
        shape: Its own.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of a tensor, as a view."""
        return whole[tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))]


def block_of(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Block:
    """The block at one coordinate of a mesh.

    Torch's own helpers take a strided shard for what would have been cut left to right,
    which differs from what FSDP2 does where sizes do not divide. So the cuts are repeated
    here in the order in which they were made: FSDP2 comes last, to the left of the others,
    and marks its shard as strided where that matters.

    Raises:
        ValueError: A placement that is neither sharded nor replicated.
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
        # As torch.chunk: equal parts but for the last ones.
        dim = placement.dim
        part = -(-size[dim] // mesh_shape[axis])
        begin = min(coordinate[axis] * part, size[dim])
        offset[dim] += begin
        size[dim] = min(part, size[dim] - begin)
    return Block(tuple(offset), tuple(size))


def local_block(parameter: torch.Tensor) -> Block:
    """The part of a parameter that this rank holds."""
    if not isinstance(parameter, DTensor):
        return Block((0,) * parameter.ndim, tuple(parameter.shape))
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank holds a parameter of a mesh it is not in"
    block = block_of(parameter.shape, parameter.placements, mesh.shape, coordinate)
    local = tuple(parameter.to_local().shape)
    # An empty part keeps its other sizes, or does not.
    assert block.shape == local or block.numel == 0 == math.prod(local), (block, local)
    return block


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a parameter, sharing its memory."""
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Held:
    """What a rank has of one parameter.

    Attributes:
        shape: Of the whole parameter.
        block: The part of it.
    """

    shape: tuple[int, ...]
    block: Block


@dataclass(frozen=True)
class Piece:
    """A block, and the rank that sends it."""

    rank: int
    block: Block


@dataclass(frozen=True)
class Assembly:
    """How a whole parameter is put together.

    Attributes:
        name: Native name.
        shape: Of the whole parameter.
        pieces: Its blocks, none of them empty.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole."""
        return math.prod(self.shape)


def plan_assembly(held_by_rank: Sequence[Mapping[str, Held]]) -> list[Assembly]:
    """Decides who sends which block of which parameter, for the whole model.

    Args:
        held_by_rank: For each rank the parameters of its pipeline stages, by name.

    Raises:
        RuntimeError: The blocks do not make up a parameter, or ranks disagree on its shape.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, dict[Block, Piece]] = {}
    for rank, held in enumerate(held_by_rank):
        for name, part in held.items():
            if shapes.setdefault(name, part.shape) != part.shape:
                raise RuntimeError(
                    f"All ranks must hold {name} in one shape, got {shapes[name]} and, on rank "
                    f"{rank}, {part.shape}. Do all ranks run one configuration?"
                )
            blocks = pieces.setdefault(name, {})
            if part.block.numel:
                blocks.setdefault(part.block, Piece(rank, part.block))
    for name, blocks in pieces.items():
        covered = sum(block.numel for block in blocks)
        if covered != math.prod(shapes[name]):
            raise RuntimeError(
                f"The shards of {name} must make up its shape {shapes[name]}, got {covered} "
                f"elements in {list(blocks.values())}. This layout is not understood."
            )
    return [
        Assembly(name, shapes[name], tuple(pieces[name].values()))
        for name in sorted(shapes, key=model_order)
    ]


def model_order(name: str) -> tuple[int, int]:
    """Sorts native names as the whole model has them; stable within a layer."""
    top, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    place = _TOP_LEVEL.index(top) if top in _TOP_LEVEL else len(_TOP_LEVEL)
    return place, int(number) if number.isdecimal() else 0


def in_buckets(
    assemblies: Sequence[Assembly], num_bytes: Callable[[Assembly], int], bucket_bytes: int
) -> list[list[Assembly]]:
    """Cuts the model into buckets of at most ``bucket_bytes``, or of one parameter."""
    buckets: list[list[Assembly]] = []
    room = 0
    for assembly in assemblies:
        size = num_bytes(assembly)
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(assembly)
        room -= size
    return buckets
