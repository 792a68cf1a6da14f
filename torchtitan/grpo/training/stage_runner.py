# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs forward and backward passes over rows through pipeline stages."""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage
from torchtitan.config import JobConfig

from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.pipeline.deferred_stage import DeferredStage
from torchtitan.grpo.pipeline.forward_only import ForwardSchedule
from torchtitan.grpo.pipeline.stages import stage_ranks
from torchtitan.grpo.pipeline.table_schedule import TableSchedule
from torchtitan.grpo.training.runner import ForwardRunner, LossFunction, ModelRunner, model_inputs


class StageLoss:
    """The loss that a pipeline schedule computes on the last stage for each microbatch.

    A schedule passes its loss function a slice of a target tensor. Here that tensor holds row
    numbers, by which the loss finds masks, advantages and other policies' logprobs. The first
    step of a schedule makes one additional call to infer shapes.
    """

    def __init__(self) -> None:
        self.loss: LossFunction | None = None

    def __call__(self, output: torch.Tensor, row_numbers: torch.Tensor) -> torch.Tensor:
        assert self.loss is not None
        begin = int(row_numbers[0])
        return self.loss(output, slice(begin, begin + len(row_numbers)))


class PipelineForwardRunner(ForwardRunner):
    """Runs the stages of a model forward. Every rank of the pipeline receives the same rows.

    Args:
        stages: Stages of this rank.
        config: Configuration of the run.
    """

    def __init__(self, stages: list[PipelineStage], config: JobConfig) -> None:
        self.rows_at_once = config.training.local_batch_size
        self.has_input = any(stage.is_first for stage in stages)
        self.has_output = any(stage.is_last for stage in stages)
        self.forward_schedule = ForwardSchedule(
            [_copy_of(stage) for stage in stages],
            stage_ranks(config.parallelism, stages[0].num_stages),
            self.rows_at_once // config.parallelism.pipeline_parallel_microbatch_size,
        )

    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        outputs = []
        for part in rows.microbatches(self.rows_at_once):
            outputs.append(
                self.forward_schedule.forward(*self.input_of(part), **model_inputs(part))
            )
        return torch.cat(outputs) if self.has_output else None

    def input_of(self, rows: TrainRows) -> tuple[torch.Tensor, ...]:
        """Returns the input of this rank's stages that does not come from other stages."""
        return (rows.tokens,) if self.has_input else ()


class PipelineRunner(ModelRunner):
    """Trains the stages of a model. Every rank of the pipeline receives the same rows.

    Args:
        schedule: Schedule over this rank's stages.
        stage_loss: Loss function that the schedule was built with.
        config: Configuration of the run.
    """

    def __init__(self, schedule: TableSchedule, stage_loss: StageLoss, config: JobConfig) -> None:
        self.schedule, self.stage_loss = schedule, stage_loss
        self.forwards = PipelineForwardRunner(schedule.stages, config)
        self.has_output = self.forwards.has_output

    def forward(self, rows: TrainRows) -> torch.Tensor | None:
        return self.forwards.forward(rows)

    def forward_backward(self, rows: TrainRows, loss: LossFunction) -> None:
        self.stage_loss.loss = loss
        begin = 0
        for part in rows.microbatches(self.forwards.rows_at_once):
            end = begin + part.num_rows
            # On the CPU, because the loss reads the values: reading a device would block.
            targets = torch.arange(begin, end) if self.has_output else None
            inputs = self.forwards.input_of(part)
            named: dict[str, Any] = {**model_inputs(part)}
            self.schedule.step(*inputs, target=targets, return_outputs=False, **named)
            for stage in self.schedule.stages:
                if isinstance(stage, DeferredStage):
                    stage.store.check_empty()
            begin = end
        self.stage_loss.loss = None


def _copy_of(stage: PipelineStage) -> PipelineStage:
    """Returns another stage around the same module.

    A stage holds buffers and shapes of one schedule, so that two schedules cannot share it.
    """
    module: nn.Module = stage.submod
    return PipelineStage(
        module, stage.stage_index, stage.num_stages, stage.device, group=stage.group
    )
