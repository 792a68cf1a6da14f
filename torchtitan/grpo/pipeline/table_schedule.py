# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the passes of pipeline stages in the order that a table gives."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.lowering import lower
from torchtitan.grpo.pipeline.simulate import simulate
from torchtitan.grpo.pipeline.tables.actions import Table
from torchtitan.grpo.pipeline.tables.costs import Costs


class TableSchedule(_PipelineScheduleRuntime):
    """Torch's runtime, with tables of this package, for any number of microbatches.

    Torch infers the shapes that stages exchange in the first pass. Later passes may have another
    number of microbatches without inferring them again.

    Args:
        stages: Stages of this rank, which no other schedule may use.
        make_table: Makes the table for a number of microbatches.
        costs: Times of the passes, which decide in which order ranks exchange tensors. Wrong ones
            cost time and change no result.
        loss: Called on the rank of the last stage, once a microbatch. None in a schedule without
            backward passes.
    """

    def __init__(
        self,
        stages: list[LeanStage],
        make_table: Callable[[int], Table],
        costs: Costs,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        # Gradients are sums: the loss has been divided by the number of trained tokens already.
        super().__init__(stages, n_microbatches=1, loss_fn=loss, scale_grads=False)  # pyright: ignore
        self.stages = stages
        ranks = make_table(1).ranks
        self.stage_index_to_group_rank = dict(enumerate(ranks))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

        @cache
        def lowered(num_microbatches: int) -> dict[int, list[_Action]]:
            table = make_table(num_microbatches)
            return lower(table, simulate(table, costs))

        self._lowered = lowered

    def run(
        self,
        inputs: Sequence[tuple[Any, ...]],
        named_inputs: Sequence[dict[str, Any]],
        targets: Sequence[torch.Tensor] | None = None,
        *,
        returns_outputs: bool = False,
    ) -> list[torch.Tensor]:
        """Runs microbatches through the pipeline. Collective over its ranks.

        Args:
            inputs: For each microbatch, what the first stage is called with; empty on other ranks.
            named_inputs: For each microbatch, further inputs of every stage.
            targets: For each microbatch, the second argument of the loss; None on other ranks
                than that of the last stage, or without a loss.
            returns_outputs: Whether to return the outputs of the last stage.

        Returns:
            The outputs of the microbatches, on the rank of the last stage and if they are wanted.
        """
        self._n_microbatches = len(named_inputs)
        self.pipeline_order_with_comms = self._lowered(self._n_microbatches)
        for stage in self.stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(
            list(inputs),
            list(named_inputs),
            None if targets is None else list(targets),
            return_outputs=returns_outputs,
        )
        for stage in self.stages:
            stage.finish_sending()
        last = next((stage for stage in self.stages if stage.is_last), None)
        return list(last.output_chunks) if last is not None and returns_outputs else []

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Infers shapes in the first pass, as torch does, and drops the buffers that it makes."""
        num_microbatches, self._n_microbatches = self._n_microbatches, 1
        super()._initialize_stages(*args, **kwargs)
        self._n_microbatches = num_microbatches
        for stage in self.stages:
            stage.receive_on_demand(num_microbatches)
