# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Determines which rows a rank trains, and whether its sums count."""

from dataclasses import dataclass

from torchtitan.grpo.upstream.parallelism import ParallelDims

# Ranks along these axes of the mesh train the same rows and see the same output.
_AXES_OF_EQUAL_ROWS = ("tp", "cp")


@dataclass(frozen=True)
class RankRole:
    """The place of the current rank among the ranks that train.

    Attributes:
        num_batch_ranks: Data-parallel degree: number of parts that a batch is divided into.
        batch_rank: Index of this rank's part. Tensor-, context- and pipeline-parallel ranks of
            one data-parallel group have the same index and receive the same rows.
        is_counted: True on exactly one of the ranks that receive the same rows. Sums over all
            ranks (losses, metrics, KL) take the values of these ranks alone, so that no row is
            counted twice.
    """

    num_batch_ranks: int
    batch_rank: int
    is_counted: bool


def rank_role(dims: ParallelDims, *, has_output: bool) -> RankRole:
    """Returns the role of the current rank.

    Args:
        has_output: Whether the rank sees the model's output (it holds the last pipeline stage).
    """
    num_batch_ranks, batch_rank = 1, 0
    if dims.dp_enabled:
        mesh = dims.get_mesh("batch")
        num_batch_ranks, batch_rank = mesh.size(), mesh.get_local_rank()
    meshes = [dims.get_optional_mesh(axis) for axis in _AXES_OF_EQUAL_ROWS]
    is_first = not any(mesh.get_local_rank() for mesh in meshes if mesh is not None)
    return RankRole(num_batch_ranks, batch_rank, is_counted=has_output and is_first)
