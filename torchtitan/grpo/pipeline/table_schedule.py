# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the passes of pipeline stages in the order of a table, and other work in the table's gaps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from torchtitan.grpo.pipeline.fill import FillJob, GapFiller
from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.lowering import GapNumbers, lower
from torchtitan.grpo.pipeline.offload import OffloadPlan
from torchtitan.grpo.pipeline.pass_marks import timed
from torchtitan.grpo.pipeline.pass_timer import PassTimer, average_costs
from torchtitan.grpo.pipeline.tables.actions import Costs, Table
from torchtitan.grpo.pipeline.tables.fused import fuse
from torchtitan.grpo.pipeline.tables.gaps import fill_gaps
from torchtitan.grpo.pipeline.tables.simulate import Simulation, simulate
from torchtitan.grpo.system.logs import logger


class GapStage(LeanStage):
    """A stage that runs forward passes inside the training pass of another model.

    Torch's runtime takes stages with successive numbers for neighbors, so the numbers of two models are
    separated by an unused one. ``trained`` is the trained stage with the same module, if there is one.
    """

    def __init__(self, stage: LeanStage, offset: int, trained: LeanStage | None) -> None:
        index, count = stage.stage_index - stage.offset, stage.num_stages - stage.offset
        super().__init__(stage.submod, index, count, stage.device, group=stage.group, offset=offset)
        self.surrounding = stage.surrounding
        self.receive_like(stage, offset)
        self.act_send_info = {
            output: [receiver + offset for receiver in receivers]
            for output, receivers in stage.act_send_info.items()
        }
        self.trained = trained
        self.outputs: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:
            self.outputs[fwd_chunk_id] = output
        return output


@dataclass(frozen=True)
class GapModel:
    stages: list[GapStage]
    numbers: GapNumbers

    def take_outputs(self, microbatches: Iterable[int]) -> list[torch.Tensor]:
        """Removes and returns outputs of the last stage; none on ranks that do not hold it."""
        last = next((stage for stage in self.stages if stage.is_last), None)
        return [] if last is None else [last.outputs.pop(number) for number in microbatches]


@dataclass
class GapRows:
    """Rows that a pass may run in its gaps. It sets ``num_done`` and, with the last stage, ``outputs``."""

    model: GapModel
    inputs: list[tuple[Any, ...]]
    named_inputs: list[dict[str, Any]]
    num_done: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)


def second_offset(num_stages: int) -> int:
    """Returns the number for the first stage of a model that is trained in another model's pass.

    One number stays free between the models, because torch takes successive stages for neighbors.
    """
    return num_stages + 1


class TableSchedule(_PipelineScheduleRuntime):
    """Runs tables of this package on torch's runtime, for any number of microbatches.

    Torch infers the shapes that stages exchange in the first pass only. Another schedule must not use
    ``stages``, this rank's, except to train them ``beside`` its own. ``costs`` determine the order of
    exchanges; wrong costs only cost time. ``loss`` is called on the rank of the last stage once per
    microbatch. If ``loss`` is None, there are no backward passes.
    """

    def __init__(
        self,
        stages: list[LeanStage],
        make_table: Callable[[int], Table],
        costs: Costs,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        # Gradients are summed: the loss is already divided by the number of trained tokens.
        super().__init__(stages, n_microbatches=1, loss_fn=loss, scale_grads=False)  # pyright: ignore
        self.stages = stages
        self._ranks = make_table(1).ranks
        self._losses: dict[tuple[int, int], torch.Tensor] = {}
        self._beside: TableSchedule | None = None
        self._gap_models: list[GapModel] = []
        self._number_stages()
        self._offload: OffloadPlan | None = None
        self.filler: GapFiller | None = None
        self._num_gap_microbatches: int | None = None
        self._moved_bytes = 0

        self._costs, self.make_table = costs, cache(make_table)
        self._fused_tables: dict[int, Table] = {}
        self._plans: dict[tuple[int, int, bool], tuple[Table, Simulation]] = {}
        self._lowered: dict[Any, dict[int, list[_Action]]] = {}

    def offload(self, share: float) -> None:
        """Makes passes keep a share of their activations in host memory until the backward pass."""
        self._offload = OffloadPlan(self.stages[0].device, share)
        for stage in self.stages:
            stage.offload = self._offload

    def fill(self, jobs: Sequence[FillJob]) -> GapFiller:
        """Makes passes run units of other work where this rank is idle."""
        self.filler = GapFiller(jobs, self.stages[0].device)
        return self.filler

    @property
    def rank_of_output(self) -> int:
        return self._ranks[-1]

    def add_gap_model(self, stages: list[LeanStage]) -> GapModel:
        """Registers a model for forward passes in gaps, on all ranks in the same order.

        The model's stages must be placed like the trained ones, and must have run in another schedule before.
        """
        is_trained = stages[0].submod is self.stages[0].submod
        offset = (2 + len(self._gap_models)) * second_offset(stages[0].num_stages)
        holders = self.stages if is_trained else [None] * len(stages)
        pairs = zip(stages, holders, strict=True)
        numbered = [GapStage(stage, offset, holder) for stage, holder in pairs]
        self._gap_models.append(GapModel(numbered, GapNumbers(offset, is_trained)))
        self._number_stages()
        return self._gap_models[-1]

    def run(
        self,
        inputs: Sequence[tuple[Any, ...]],
        named_inputs: Sequence[dict[str, Any]],
        targets: Sequence[torch.Tensor] | None = None,
        *,
        returns_outputs: bool = False,
        waiting: Sequence[GapRows] = (),
        beside: "TableSchedule | None" = None,
    ) -> list[torch.Tensor]:
        """Runs microbatches through the pipeline; collective over its ranks.

        Each microbatch has arguments of the first stage (``inputs``, empty on other ranks), keyword
        arguments of every stage, and a second argument of the loss (``targets``, on the last stage's
        rank). ``waiting`` rows may run in gaps, the most urgent first. ``beside`` trains another
        model with the same microbatches; both must have run before. Returns the last stage's outputs
        on its rank if ``returns_outputs``, and otherwise an empty list.
        """
        self._n_microbatches = len(named_inputs)
        self._beside = beside
        self._losses.clear()
        in_gaps = self._prepare(waiting)
        for stage in () if beside is None else beside.stages:
            stage.receive_on_demand(self._n_microbatches)
        for stage in self._stages:
            stage.has_backward = self._has_backward and not isinstance(stage, GapStage)
            stage.clear_runtime_states()
        num_waiting = sum(len(rows.named_inputs) for rows in waiting)
        with self._observed(*self._plan(num_waiting)):
            self._step_microbatches(
                [*inputs, *(args for gap in in_gaps for args in gap.inputs[: gap.num_done])],
                [*named_inputs, *(n for gap in in_gaps for n in gap.named_inputs[: gap.num_done])],
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
        """Returns metrics of this rank since the last call: work run in gaps, and memory moved to the host."""
        in_gaps, self._num_gap_microbatches = self._num_gap_microbatches, None
        metrics = {} if in_gaps is None else {"pipeline/gap_microbatches": float(in_gaps)}
        if self._offload is not None:
            memory, before = self._offload.memory, self._moved_bytes
            self._moved_bytes = memory.moved_bytes
            metrics["pipeline/offload_gib"] = (memory.moved_bytes - before) / 2**30
            metrics["pipeline/offload_peak_gib"] = memory.peak_host_bytes / 2**30
        return metrics

    def _prepare(self, waiting: Sequence[GapRows]) -> list[GapRows]:
        waits = [rows for rows in waiting for _ in rows.named_inputs]
        table, simulation = self._plan(len(waits))
        fitting = waits[: table.num_gap_microbatches]
        gaps = tuple(rows.model.numbers for rows in fitting)
        key = (self._n_microbatches, len(waits), gaps, self._beside is not None)
        if key not in self._lowered:
            self._lowered[key] = lower(table, simulation, gaps, self._offsets)
        self.pipeline_order_with_comms = self._lowered[key]
        for rows in waiting:
            rows.num_done = sum(one is rows for one in fitting)
        if waiting:
            self._num_gap_microbatches = (self._num_gap_microbatches or 0) + len(fitting)
        in_gaps = [rows for rows in waiting if rows.num_done]
        gap_stages = [stage for rows in in_gaps for stage in rows.model.stages]
        trained = [stage for stages in self._trained for stage in stages]
        self._stages = [*trained, *dict.fromkeys(gap_stages)]
        return in_gaps

    @property
    def _trained(self) -> list[list[LeanStage]]:
        """This rank's stages of each model that is trained."""
        return [self.stages] if self._beside is None else [self.stages, self._beside.stages]

    @property
    def _offsets(self) -> list[int]:
        return [stages[0].offset for stages in self._trained]

    def _plan(self, num_waiting: int) -> tuple[Table, Simulation]:
        key = (self._n_microbatches, num_waiting, self._beside is not None)
        if key not in self._plans:
            table, costs = self.make_table(self._n_microbatches), self._costs
            if self._beside is not None:
                # Both models have equal stages, and only the costs of the own ones may be measured.
                costs = replace(costs, stages=2 * costs.stages)
                table = self._fused(table, self._beside, costs)
            if num_waiting:
                table = fill_gaps(table, costs, num_waiting)
            self._plans[key] = table, simulate(table, costs)
        return self._plans[key]

    def _fused(self, table: Table, beside: "TableSchedule", costs: Costs) -> Table:
        number = self._n_microbatches
        if number not in self._fused_tables:
            fused = fuse(table, beside.make_table(number), costs)
            if not self._fused_tables:
                two_passes = 2 * simulate(table, costs).makespan
                logger.info(
                    f"One pass trains both models. With {number} microbatches, it takes "
                    f"{simulate(fused, costs).makespan / two_passes:.2f} of the time of two passes, "
                    "by a simulation."
                )
            self._fused_tables[number] = fused
        return self._fused_tables[number]

    @contextmanager
    def _observed(self, table: Table, simulation: Simulation) -> Iterator[None]:
        """Context that offloads activations and fills gaps, and times passes when either needs times."""
        observers = [o for o in (self._offload, self.filler) if o is not None]
        for observer in observers:
            observer.begin(table, simulation, self.rank)
        asking = [observer for observer in observers if observer.measures]
        timer = PassTimer(self.stages[0].device) if asking else None
        if timer is not None:
            self._time(timer)
        for stage in cast(list[LeanStage], self._stages):
            stage.filler = self.filler
        try:
            yield
        finally:
            if timer is not None:
                self._time(None)
        for observer in observers:
            observer.finish()
        if timer is not None:
            numbers = [table.number(stage, self._offsets) for stage in range(table.num_stages)]
            costs = average_costs(timer, numbers, 1.0, self.stages[0].group)
            for observer in asking:
                observer.learn(costs)

    def _time(self, timer: PassTimer | None) -> None:
        for stages in self._trained:
            for stage in stages:
                stage.timer = timer

    def _number_stages(self) -> None:
        offsets = [self.stages[0].offset, *(model.numbers.offset for model in self._gap_models)]
        self.stage_index_to_group_rank = {
            offset + stage: rank for offset in offsets for stage, rank in enumerate(self._ranks)
        }
        for stages in (self.stages, *(model.stages for model in self._gap_models)):
            for stage in stages:
                stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def _check_inputs(self, arg_mbs: Any, kwarg_mbs: Any, *_: Any) -> tuple[list, list]:
        """Accepts any number of microbatches: those in gaps come on top of the trained ones."""
        return arg_mbs, kwarg_mbs

    def _maybe_compute_loss(
        self, stage: Any, output: Any, targets: Any, microbatch: int, *_: Any, **__: Any
    ) -> None:
        """Computes the loss of the model that the stage belongs to; torch knows only one model."""
        if isinstance(stage, GapStage) or not stage.is_last:
            return
        other = self._beside
        loss = other._loss_fn if other and stage in other.stages else self._loss_fn
        if loss is not None:
            with timed(stage.stage_index, "F", microbatch, None, stage.marks):
                self._losses[stage.stage_index, microbatch] = loss(output, targets[microbatch])

    def _maybe_get_loss(self, stage: Any, microbatch: int) -> torch.Tensor | None:
        return self._losses.pop((stage.stage_index, microbatch), None)

    def _assert_unsharded(self, stage: Any) -> None:
        """Checks the trained stage in place of a gap stage that shares its weights: they are gathered once."""
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
