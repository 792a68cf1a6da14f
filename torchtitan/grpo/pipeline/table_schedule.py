# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the passes of pipeline stages in the order of a table."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from torchtitan.grpo.pipeline.gap_stage import GapModel, GapRows, GapStage
from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.lowering import GapNumbers, lower
from torchtitan.grpo.pipeline.offload_plan import OffloadPlan
from torchtitan.grpo.pipeline.pass_timer import PassTimer
from torchtitan.grpo.pipeline.simulate import Simulation, simulate
from torchtitan.grpo.pipeline.tables.actions import Table
from torchtitan.grpo.pipeline.tables.costs import Costs
from torchtitan.grpo.pipeline.tables.gaps import fill_gaps


class TableSchedule(_PipelineScheduleRuntime):
    """Runs tables of this package on torch's runtime, for any number of microbatches.

    In the first pass, torch infers the shapes that stages exchange. Later passes may have another
    number of microbatches, and the shapes are not inferred again.

    Args:
        stages: Stages of this rank. No other schedule may use them.
        make_table: Makes the table for a number of microbatches.
        costs: Times of the passes, which determine the order in which ranks exchange tensors. Wrong
            times make the pipeline slower but do not change results.
        loss: Called on the rank of the last stage once per microbatch. None in a schedule without
            backward passes.
    """

    def __init__(
        self,
        stages: list[LeanStage],
        make_table: Callable[[int], Table],
        costs: Costs,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        # Gradients are summed and not scaled, because the loss has already been divided by the
        # number of trained tokens.
        super().__init__(stages, n_microbatches=1, loss_fn=loss, scale_grads=False)  # pyright: ignore
        self.stages = stages
        self._ranks = make_table(1).ranks
        self._gap_models: list[GapModel] = []
        self._number_stages()
        self._offload: OffloadPlan | None = None
        self._num_gap_microbatches: int | None = None
        self._moved_bytes = 0

        @cache
        def filled(num_microbatches: int, num_waiting: int) -> Table:
            table = make_table(num_microbatches)
            return fill_gaps(table, costs, num_waiting) if num_waiting else table

        @cache
        def simulated(num_microbatches: int, num_waiting: int) -> Simulation:
            return simulate(filled(num_microbatches, num_waiting), costs)

        @cache
        def lowered(
            num_microbatches: int, num_waiting: int, gaps: tuple[GapNumbers, ...]
        ) -> dict[int, list[_Action]]:
            table = filled(num_microbatches, num_waiting)
            return lower(table, simulated(num_microbatches, num_waiting), gaps)

        self._filled, self._simulated, self._lowered = filled, simulated, lowered

    def offload(self, share: float) -> None:
        """Keeps activations in host memory until their backward pass.

        Args:
            share: ``grpo.pipeline_offload``.
        """
        stage = self.stages[0]
        assert stage.group is not None, "the stages have no process group"
        self._offload = OffloadPlan(stage.device, share, stage.group)
        for stage in self.stages:
            stage.offload = self._offload

    def add_gap_model(self, stages: list[LeanStage]) -> GapModel:
        """Registers a model that may run forward passes in the gaps of training passes.

        All ranks must register the same models in the same order.

        Args:
            stages: This rank's stages of the model, which must have the same placement as the trained
                model. They belong to another schedule, which must have run their forward passes.
        """
        model = GapModel.beside(self.stages, stages, 1 + len(self._gap_models))
        self._gap_models.append(model)
        self._number_stages()
        return model

    def run(
        self,
        inputs: Sequence[tuple[Any, ...]],
        named_inputs: Sequence[dict[str, Any]],
        targets: Sequence[torch.Tensor] | None = None,
        *,
        returns_outputs: bool = False,
        waiting: Sequence[GapRows] = (),
    ) -> list[torch.Tensor]:
        """Runs microbatches through the pipeline; collective over its ranks.

        Args:
            inputs: For each microbatch, the arguments of the first stage. They are empty on ranks
                that do not hold the first stage.
            named_inputs: For each microbatch, further keyword arguments of every stage.
            targets: For each microbatch, the second argument of the loss. None without a loss, and on
                ranks that do not hold the last stage.
            returns_outputs: Whether to return the outputs of the last stage.
            waiting: Microbatches for the gaps, in descending order of urgency. As many are run as fit
                into the gaps, and :attr:`GapRows.num_done` is set to their number.

        Returns:
            The outputs of the microbatches on the rank of the last stage, if ``returns_outputs`` is
            set. Otherwise, the list is empty.
        """
        self._n_microbatches = len(named_inputs)
        in_gaps = self._prepare(waiting)
        for stage in self._stages:
            stage.has_backward = self._has_backward and not isinstance(stage, GapStage)
            stage.clear_runtime_states()
        num_waiting = sum(len(rows.named_inputs) for rows in waiting)
        with self._offloading(num_waiting):
            self._step_microbatches(
                [*inputs, *(args for rows in in_gaps for args in rows.inputs[: rows.num_done])],
                [
                    *named_inputs,
                    *(n for rows in in_gaps for n in rows.named_inputs[: rows.num_done]),
                ],
                None if targets is None else list(targets),
                return_outputs=returns_outputs,
            )
        for stage in cast(list[LeanStage], self._stages):
            stage.finish_sending()
        number = self._n_microbatches
        for rows in in_gaps:
            rows.outputs = rows.model.take_outputs(range(number, number + rows.num_done))
            number += rows.num_done
        last = next((stage for stage in self.stages if stage.is_last), None)
        return list(last.output_chunks) if last is not None and returns_outputs else []

    def take_metrics(self) -> dict[str, float]:
        """Returns what this rank's gaps and its host memory took up since the last call."""
        in_gaps, self._num_gap_microbatches = self._num_gap_microbatches, None
        metrics = {} if in_gaps is None else {"pipeline/gap_microbatches": float(in_gaps)}
        if self._offload is not None:
            memory, before = self._offload.memory, self._moved_bytes
            self._moved_bytes = memory.moved_bytes
            metrics["pipeline/offload_gib"] = (memory.moved_bytes - before) / 2**30
            metrics["pipeline/offload_peak_gib"] = memory.peak_host_bytes / 2**30
        return metrics

    def _prepare(self, waiting: Sequence[GapRows]) -> list[GapRows]:
        """Sets the actions and the stages of a pass, and returns the rows that run in its gaps."""
        waits = [rows for rows in waiting for _ in rows.named_inputs]
        fitting = waits[: self._filled(self._n_microbatches, len(waits)).num_gap_microbatches]
        self.pipeline_order_with_comms = self._lowered(
            self._n_microbatches, len(waits), tuple(rows.model.numbers for rows in fitting)
        )
        for rows in waiting:
            rows.num_done = sum(one is rows for one in fitting)
        if waiting:
            self._num_gap_microbatches = (self._num_gap_microbatches or 0) + len(fitting)
        in_gaps = [rows for rows in waiting if rows.num_done]
        gap_stages = [stage for rows in in_gaps for stage in rows.model.stages]
        self._stages = [*self.stages, *dict.fromkeys(gap_stages)]
        return in_gaps

    @contextmanager
    def _offloading(self, num_waiting: int) -> Iterator[None]:
        """Plans which activations are moved to the host in the pass that runs in the context."""
        if self._offload is None:
            yield
            return
        table = self._filled(self._n_microbatches, num_waiting)
        self._offload.begin(table, self._simulated(self._n_microbatches, num_waiting), self.rank)
        timer = PassTimer(self.stages[0].device) if self._offload.measures else None
        for stage in self.stages:
            stage.timer = timer
        try:
            yield
        finally:
            for stage in self.stages:
                stage.timer = None
        self._offload.finish()
        if timer is not None:
            self._offload.end(table, timer)

    def _number_stages(self) -> None:
        """Tells all stages which rank holds the stage with each number."""
        offsets = [0, *(model.numbers.offset for model in self._gap_models)]
        self.stage_index_to_group_rank = {
            offset + stage: rank for offset in offsets for stage, rank in enumerate(self._ranks)
        }
        for stages in (self.stages, *(model.stages for model in self._gap_models)):
            for stage in stages:
                stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def _check_inputs(self, arg_mbs: Any, kwarg_mbs: Any, *_: Any) -> tuple[list, list]:
        """Accepts more microbatches than are trained."""
        return arg_mbs, kwarg_mbs

    def _maybe_compute_loss(self, stage: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(stage, GapStage):
            super()._maybe_compute_loss(stage, *args, **kwargs)

    def _assert_unsharded(self, stage: Any) -> None:
        """Checks the stage whose parameters were gathered."""
        if isinstance(stage, GapStage) and stage.trained is not None:
            stage = stage.trained
        super()._assert_unsharded(stage)

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Infers shapes in the first pass, as torch does, and drops the buffers that torch makes."""
        num_microbatches, stages = self._n_microbatches, self._stages
        self._n_microbatches, self._stages = 1, cast(list[Any], self.stages)
        super()._initialize_stages(*args, **kwargs)
        self._n_microbatches, self._stages = num_microbatches, stages
        for stage in self.stages:
            stage.receive_on_demand(num_microbatches)
