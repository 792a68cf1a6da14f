# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs forward and backward passes over rows through pipeline stages."""

from collections.abc import Sequence
from dataclasses import astuple

import torch

from torchtitan.grpo.data.feed import Feed
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.pipeline.build import build_forward_schedule
from torchtitan.grpo.pipeline.fill import FillJob, GapFiller
from torchtitan.grpo.pipeline.helix_schedule import HelixSchedule
from torchtitan.grpo.pipeline.lean_stage import DeferredStage, LeanStage
from torchtitan.grpo.pipeline.table_schedule import GapModel, GapRows, TableSchedule
from torchtitan.grpo.training.runner import (
    ForwardJob,
    ForwardRunner,
    LossFunction,
    ModelRunner,
    model_inputs,
)


class StageLoss:
    """Loss that a pipeline schedule computes on the last stage for each microbatch.

    The schedule's targets are row numbers, by which the loss finds masks, advantages and logprobs.
    The first step makes one additional call to infer shapes.
    """

    def __init__(self) -> None:
        self.loss: LossFunction | None = None

    def __call__(self, output: torch.Tensor, row_numbers: torch.Tensor) -> torch.Tensor:
        assert self.loss is not None
        begin = int(row_numbers.numpy()[0])  # they are in host memory
        return self.loss(output, slice(begin, begin + len(row_numbers)))


class PipelineForwardRunner(ForwardRunner):
    """Runs stages forward. Every rank of the pipeline receives the same rows."""

    def __init__(self, stages: list[LeanStage], config: JobConfig) -> None:
        self.microbatch_rows = config.parallelism.pipeline_parallel_microbatch_size
        self.has_input = any(stage.is_first for stage in stages)
        self.has_output = any(stage.is_last for stage in stages)
        self.schedule = build_forward_schedule(config, stages)
        # Other schedules have no gaps for the passes of another model.
        self.stages = self.schedule.stages if isinstance(self.schedule, TableSchedule) else ()

    @torch.no_grad()
    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        parts = rows.microbatches(self.microbatch_rows)
        outputs = self.schedule.run(
            self.inputs_of(parts), [model_inputs(part) for part in parts], returns_outputs=True
        )
        return torch.cat(outputs) if self.has_output else None

    def inputs_of(self, parts: list[TrainRows]) -> list[tuple[torch.Tensor, ...]]:
        return [(part.tokens,) if self.has_input else () for part in parts]


class PipelineRunner(ModelRunner):
    """Trains stages on one sequence of microbatches, so the pipeline is filled once."""

    def __init__(
        self, schedule: TableSchedule | HelixSchedule, stage_loss: StageLoss, config: JobConfig
    ) -> None:
        self.schedule, self.stage_loss = schedule, stage_loss
        self.forwards = PipelineForwardRunner(schedule.stages, config)
        self.has_output, self.stages = self.forwards.has_output, self.forwards.stages
        self._gap_models: dict[LeanStage, GapModel] = {}
        self._fill_metrics: dict[str, float] = {}
        self._filler: GapFiller | None = None

    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        return self.forwards.forward(rows)

    def forward_backward(
        self, rows: TrainRows, loss: LossFunction, waiting: Sequence[ForwardJob] = ()
    ) -> None:
        self.stage_loss.loss = loss
        parts = rows.microbatches(self.forwards.microbatch_rows)
        # On the CPU, because the loss reads the values: reading a device would block.
        numbers = torch.arange(rows.num_rows).split(self.forwards.microbatch_rows)
        jobs = [job for job in waiting if not job.is_done and _has_run(job)]
        in_gaps = [self._gap_rows(job) for job in jobs]
        self.schedule.run(
            self.forwards.inputs_of(parts),
            [model_inputs(part, trains=True) for part in parts],
            numbers if self.has_output else None,
            waiting=in_gaps,
        )
        for job, gap_rows in zip(jobs, in_gaps, strict=True):
            job.add(gap_rows.num_done * self.forwards.microbatch_rows, gap_rows.outputs)
        for stage in self.schedule.stages:
            if isinstance(stage, DeferredStage):
                stage.store.check_empty()
        self.stage_loss.loss = None

    def fill(self, jobs: Sequence[FillJob]) -> None:
        """Runs units of other work where this rank is idle."""
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
        parts = job.waiting.microbatches(self.forwards.microbatch_rows)
        return GapRows(
            self._gap_models[first],
            self.forwards.inputs_of(parts),
            [model_inputs(part) for part in parts],
        )


def fill_metrics(filler: GapFiller, feed: Feed) -> dict[str, float]:
    """Returns what all ranks have filled since the last call. Collective over all ranks."""
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
    """Returns whether a job's model has inferred its shapes, which it cannot do in a gap."""
    return all(stage.knows_shapes for stage in job.runner.stages)
