# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures the time to send a tensor from a pipeline rank to its neighbor."""

import torch
import torch.distributed as dist

from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.pass_timer import PassTimer

_NUM_EXCHANGES = 64


def measure_hops(stages: list[LeanStage], timer: PassTimer) -> None:
    """Sends tensors of the size that stages exchange to the neighboring ranks and back.

    The function is collective over the pipeline's ranks. Of two neighbors, the rank with the lower
    number measures. No rank exchanges tensors with both neighbors at the same time, so that the
    measured times are those of an idle connection.

    Args:
        stages: Stages of this rank, which must have run before.
        timer: Collects the times.
    """
    rank, num_ranks = stages[0].group_rank, stages[0].group_size
    tensor = stages[0].example_of_exchanges()
    for first in (0, 1):  # the ranks 0 and 1, 2 and 3, ..., and then 1 and 2, 3 and 4, ...
        begins = (rank - first) % 2 == 0
        neighbor = rank + 1 if begins else rank - 1
        if not 0 <= neighbor < num_ranks:
            continue
        _exchange(tensor, neighbor, stages[0].group, begins=begins)  # opens the connection
        for _ in range(_NUM_EXCHANGES):
            if begins:
                with timer.measure_round_trip():
                    _exchange(tensor, neighbor, stages[0].group, begins=True)
            else:
                _exchange(tensor, neighbor, stages[0].group, begins=False)


def _exchange(
    tensor: torch.Tensor, neighbor: int, group: dist.ProcessGroup | None, *, begins: bool
) -> None:
    if begins:
        dist.send(tensor, group=group, group_dst=neighbor)
    dist.recv(tensor, group=group, group_src=neighbor)
    if not begins:
        dist.send(tensor, group=group, group_dst=neighbor)
