# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the passes of pipeline stages in the order that a table gives."""

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from torchtitan.grpo.pipeline.lowering import lower
from torchtitan.grpo.pipeline.simulate import simulate
from torchtitan.grpo.pipeline.tables.actions import Table
from torchtitan.grpo.pipeline.tables.costs import Costs


class TableSchedule(_PipelineScheduleRuntime):
    """Torch's runtime, with a table of this package.

    Args:
        stages: Stages of this rank.
        table: The passes of all ranks.
        costs: Times of the passes, which decide in which order ranks exchange tensors. Wrong ones
            cost time and change no result.
        loss: Called on the rank of the last stage, once a microbatch.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        table: Table,
        costs: Costs,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        # Gradients are sums: the loss has been divided by the number of trained tokens already.
        super().__init__(  # pyright: ignore[reportCallIssue]
            stages, n_microbatches=table.num_microbatches, loss_fn=loss, scale_grads=False
        )
        self.table, self.stages = table, stages
        self.stage_index_to_group_rank = dict(enumerate(table.ranks))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order_with_comms = lower(table, simulate(table, costs))
