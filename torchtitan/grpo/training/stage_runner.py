# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs forward and backward passes over rows through pipeline stages."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.feed import Feed
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.pipeline.build import AnySchedule, build_forward_schedule
from torchtitan.grpo.pipeline.fill import FillJob, GapFiller
from torchtitan.grpo.pipeline.lean_stage import DeferredStage, LeanStage
from torchtitan.grpo.pipeline.pass_marks import PassMarks
from torchtitan.grpo.pipeline.stages import trains_together
from torchtitan.grpo.pipeline.table_schedule import GapModel, GapRows, TableSchedule
from torchtitan.grpo.training.runner import (
    ForwardJob,
    ForwardRunner,
    LossFunction,
    ModelRunner,
    TrainJob,
    model_inputs,
)


class StageLoss:
    """Loss that a pipeline schedule computes on the last stage for each microbatch.

    The schedule's targets are row numbers, by which the loss finds masks, advantages and logprobs.
    In the first step, the schedule calls the loss once more, to infer shapes.
    """

    def __init__(self) -> None:
        self.loss: LossFunction | None = None

    def __call__(self, output: torch.Tensor, row_numbers: torch.Tensor) -> torch.Tensor:
        assert self.loss is not None
        begin = int(row_numbers.numpy()[0])  # they are in host memory
        return self.loss(output, slice(begin, begin + len(row_numbers)))


class PipelineForwardRunner(ForwardRunner):
    """Runs forward passes through the stages. Every rank of the pipeline receives the same rows."""

    def __init__(self, stages: list[LeanStage], config: JobConfig) -> None:
        self.microbatch_rows = config.parallelism.pipeline_parallel_microbatch_size
        self.has_input = any(stage.is_first for stage in stages)
        self.has_output = any(stage.is_last for stage in stages)
        self.forward_schedule = build_forward_schedule(config, stages)
        # Other schedules have no gaps for the passes of another model.
        has_gaps = isinstance(self.forward_schedule, TableSchedule)
        self.stages = self.forward_schedule.stages if has_gaps else ()

    @torch.no_grad()
    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        parts = rows.microbatches(self.microbatch_rows)
        self.mark("forward")
        outputs = self.forward_schedule.run(
            self.inputs_of(parts), [model_inputs(part) for part in parts], returns_outputs=True
        )
        self.mark("")
        return torch.cat(outputs) if self.has_output else None

    def to_all(self, output: torch.Tensor | None, rows: TrainRows) -> torch.Tensor:
        if output is None:
            output = torch.empty(rows.tokens.shape, device=rows.tokens.device)
        output, schedule = output.contiguous(), self.forward_schedule
        group = schedule.stages[0].group
        dist.broadcast(output, group=group, group_src=schedule.rank_of_output)
        return output

    def inputs_of(self, parts: list[TrainRows]) -> list[tuple[torch.Tensor, ...]]:
        return [(part.tokens,) if self.has_input else () for part in parts]


class PipelineRunner(PipelineForwardRunner, ModelRunner):
    """Trains the stages on all microbatches in one sequence, so that the pipeline fills only once."""

    def __init__(self, schedule: AnySchedule, stage_loss: StageLoss, config: JobConfig) -> None:
        super().__init__(schedule.stages, config)
        self.schedule, self.stage_loss = schedule, stage_loss
        self._trains_together = trains_together(config)
        self._gap_models: dict[LeanStage, GapModel] = {}
        self._fill_metrics: dict[str, float] = {}
        self._filler: GapFiller | None = None

    def forward_backward(
        self,
        rows: TrainRows,
        loss: LossFunction,
        waiting: Sequence[ForwardJob] = (),
        beside: TrainJob | None = None,
    ) -> None:
        other: PipelineRunner | None = None
        if beside is not None and self._can_train(beside.runner):
            other = beside.runner
            other.stage_loss.loss = beside.loss
        self.stage_loss.loss = loss
        self._run(rows, waiting, other)
        self._finish()
        if other is not None:
            other._finish()
        elif beside is not None:
            beside.runner.forward_backward(rows, beside.loss)

    def _run(
        self, rows: TrainRows, waiting: Sequence[ForwardJob], other: "PipelineRunner | None"
    ) -> None:
        """Trains this runner's model and that of ``other`` in one pass."""
        runners = [self] if other is None else [self, other]
        parts = rows.microbatches(self.microbatch_rows)
        # On the CPU, because the loss reads the values: reading a device would block.
        numbers = torch.arange(rows.num_rows).split(self.microbatch_rows)
        jobs = [job for job in waiting if not job.is_done and _has_run(job)]
        in_gaps = [self._gap_rows(job) for job in jobs]
        has_input = any(runner.has_input for runner in runners)
        beside: Any = None if other is None else other.schedule
        self.mark("pipeline")
        self.schedule.run(
            [(part.tokens,) if has_input else () for part in parts],
            [model_inputs(part, trains=True) for part in parts],
            numbers if any(runner.has_output for runner in runners) else None,
            waiting=in_gaps,
            beside=beside,
        )
        self.mark("")
        for job, gap_rows in zip(jobs, in_gaps, strict=True):
            job.add(gap_rows.num_done * self.microbatch_rows, gap_rows.outputs)

    def mark_in(self, marks: PassMarks) -> None:
        super().mark_in(marks)
        for one in (self.schedule, *self.schedule.stages):
            one.marks = marks  # pyright: ignore[reportAttributeAccessIssue]

    def _finish(self) -> None:
        self.stage_loss.loss = None
        for stage in self.schedule.stages:
            if isinstance(stage, DeferredStage):
                stage.store.check_empty()

    def _can_train(self, other: ModelRunner) -> "TypeGuard[PipelineRunner]":
        """Returns whether one pass can also train ``other``; it can only if all stages know their shapes."""
        if not (self._trains_together and isinstance(other, PipelineRunner)):
            return False
        stages = (*self.schedule.stages, *other.schedule.stages)
        return all(stage.knows_shapes for stage in stages)

    def fill(self, jobs: Sequence[FillJob]) -> None:
        """Runs units of ``jobs``, which are other work, where this rank would be idle."""
        assert isinstance(self.schedule, TableSchedule)
        self._filler = self.schedule.fill(jobs)

    def begin_step(self, step: int) -> None:
        if self._filler is not None:
            self._filler.begin_step(step)

    def end_step(self, feed: Feed) -> None:
        if self._filler is not None:
            self._fill_metrics = fill_metrics(self._filler, feed)

    def take_metrics(self) -> dict[str, float]:
        metrics, self._fill_metrics = self._fill_metrics, {}
        return self.schedule.take_metrics() | metrics

    def close(self) -> None:
        if self._filler is not None:
            self._filler.close()

    def _gap_rows(self, job: ForwardJob) -> GapRows:
        first = job.runner.stages[0]
        assert isinstance(self.schedule, TableSchedule)
        if first not in self._gap_models:
            self._gap_models[first] = self.schedule.add_gap_model(list(job.runner.stages))
        parts = job.waiting.microbatches(self.microbatch_rows)
        return GapRows(
            self._gap_models[first],
            self.inputs_of(parts),
            [model_inputs(part) for part in parts],
        )


def fill_metrics(filler: GapFiller, feed: Feed) -> dict[str, float]:
    """Returns metrics of the work done in idle time since the last call. Collective over all ranks."""
    figures = filler.take_figures()
    of_ranks = torch.zeros(len(feed.batch_rank_of), 5, dtype=torch.float64)
    of_ranks[feed.rank] = torch.tensor([*astuple(figures), sum(job.is_lost for job in filler.jobs)])
    of_ranks = feed.all_reduce_sum(of_ranks)
    units, seconds, usable, _, lost = of_ranks.sum(0).tolist()
    return {
        "pipeline/fill_units": units,
        "pipeline/fill_seconds": seconds,
        "pipeline/fill_usable_seconds": usable,
        "pipeline/fill_late_seconds": float(of_ranks[:, 3].max()),
        "pipeline/fill_lost_jobs": lost,
    }


def _has_run(job: ForwardJob) -> bool:
    """Returns whether the job's model has run and so knows its shapes, which it cannot infer in a gap."""
    return all(stage.knows_shapes for stage in job.runner.stages)
