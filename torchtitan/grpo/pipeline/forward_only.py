# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Forward passes through pipeline stages, without a backward.

Torch's schedules refuse to evaluate under V placement, and switching a schedule between
training and evaluation infers all shapes anew each time. So the forward pass has a
schedule of its own, over stage objects of its own around the same modules: breadth first,
all microbatches through one stage and then through the next that the rank holds.
"""

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    FORWARD,
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)


class ForwardSchedule(_PipelineScheduleRuntime):
    """Runs stages forward. Collective over the pipeline's ranks.

    Args:
        stages: This rank's; used by nobody else.
        stage_ranks: For each stage of the pipeline the pipeline rank that holds it.
        num_microbatches: Of one pass.
    """

    def __init__(
        self, stages: list[PipelineStage], stage_ranks: list[int], num_microbatches: int
    ) -> None:
        super().__init__(stages, n_microbatches=num_microbatches)  # pyright: ignore
        self.stage_index_to_group_rank = dict(enumerate(stage_ranks))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        compute = {
            rank: _add_unshard_reshard(
                [
                    _Action(stage, FORWARD, microbatch)
                    for stage, holder in enumerate(stage_ranks)
                    if holder == rank
                    for microbatch in range(num_microbatches)
                ]
            )
            for rank in range(max(stage_ranks) + 1)
        }
        # The tables that the base class runs; its own builder insists on backwards.
        self.pipeline_order_with_comms = _add_send_recv(
            compute, lambda stage: stage_ranks[stage], len(stage_ranks)
        )

    @torch.no_grad()
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor | None:
        """One pass; the last stage's output where this rank holds it.

        Args:
            args: On the rank of the first stage its input, [rows, ...].
            kwargs: Every stage's further inputs, [rows, ...].
        """
        return self.step(*args, **kwargs)  # pyright: ignore[reportArgumentType]
