# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Forward passes through pipeline stages, without a backward pass.

Torch's schedules cannot evaluate under V placement, and a schedule that switches between
training and evaluation infers all shapes again each time. The forward pass therefore has a
separate schedule, over separate stage objects around the same modules. It is breadth first: all
microbatches pass one stage of a rank before they pass the rank's next stage.
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
    """Runs the stages of a pipeline forward only. Collective over the pipeline's ranks.

    Args:
        stages: Stages of this rank, which no other schedule may use.
        stage_ranks: For each stage of the pipeline, the pipeline rank that holds it.
        num_microbatches: Number of microbatches of one pass.
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
        # The tables that the base class runs. Its own builder requires backward passes.
        self.pipeline_order_with_comms = _add_send_recv(
            compute, lambda stage: stage_ranks[stage], len(stage_ranks)
        )

    @torch.no_grad()
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor | None:
        """Runs one pass; returns the last stage's output on the rank that holds it, else None.

        Args:
            args: On the rank of the first stage, its input [rows, ...].
            kwargs: Further inputs of every stage, [rows, ...].
        """
        return self.step(*args, **kwargs)  # pyright: ignore[reportArgumentType]
