# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The pipeline schedules that ``parallelism.pipeline_parallel_schedule`` may name, one row each.

The configuration checks, the placement of stages and the output layer read these rows, so that
adding a schedule means adding a row (docs/how-to/add-a-schedule.md). The module imports no
torch: the class of a schedule is looked up when a pipeline is built.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

_TORCH = "torch.distributed.pipelining.schedules"

Feature = Literal["compile"]
"""A setting that a schedule may refuse: ``compile.enable`` with the model among
``compile.components``."""


@dataclass(frozen=True)
class Schedule:
    """Describes a pipeline schedule to the rest of the package.

    Attributes:
        name: Value of ``parallelism.pipeline_parallel_schedule``, also shown in messages.
        class_path: Where the class stands, as ``package.module:Class``. It takes the arguments
            of torch's schedules.
        stages_per_rank: Stages that each pipeline rank holds. With ``allows_more_stages`` it is
            the default and the minimum, and all ranks hold equally many.
        allows_more_stages: True if ``parallelism.pipeline_parallel_layers_per_stage`` may cut
            the model into more than ``stages_per_rank`` stages a rank.
        placement: Which rank holds which stage. Under ``loop``, stage s of a pipeline of p ranks
            lies on rank s mod p. Under ``v``, rank r holds the stages r and 2p - 1 - r.
        microbatches: How many microbatches one pass may have. ``any``: any number.
            ``at_least_stages``: at least as many as the whole pipeline has stages.
            ``whole_rounds``: the schedule runs about p microbatches a round, and the number must
            be a multiple of the number of rounds, which is the number divided by p, rounded down.
        is_zero_bubble: True if the schedule computes the gradients of a stage's inputs and those
            of its weights at different times, in order to fill the pipeline's idle time.
        finishes_each_microbatch: True if the last stage completes the backward pass of each
            microbatch, weight gradients included, before it begins the next. Only then can the
            output layer keep logits for the backward pass in the memory of one microbatch.
        refuses: Features that cannot be combined with the schedule.
    """

    name: str
    class_path: str
    stages_per_rank: int
    allows_more_stages: bool
    placement: Literal["loop", "v"]
    microbatches: Literal["any", "at_least_stages", "whole_rounds"]
    is_zero_bubble: bool
    finishes_each_microbatch: bool
    refuses: tuple[Feature, ...] = ()

    @property
    def stages_in_words(self) -> str:
        """How many stages each rank needs, as a part of a message."""
        if self.allows_more_stages:
            return f"the same number of stages, at least {self.stages_per_rank},"
        return f"exactly {self.stages_per_rank} stage{'s' if self.stages_per_rank > 1 else ''}"

    def allows_stages(self, total_stages: int, num_ranks: int) -> bool:
        """Returns whether ``total_stages`` stages can be spread over ``num_ranks`` ranks."""
        per_rank, rest = divmod(total_stages, num_ranks)
        if rest != 0:
            return False
        return per_rank == self.stages_per_rank or (
            self.allows_more_stages and per_rank > self.stages_per_rank
        )

    def microbatch_problem(self, num_microbatches: int, num_ranks: int) -> str | None:
        """Returns why a pass cannot have so many microbatches, or None if it can."""
        if self.microbatches == "at_least_stages":
            stages = num_ranks * self.stages_per_rank
            if num_microbatches < stages:
                return f"it needs at least as many microbatches as stages, which are {stages}"
        if self.microbatches == "whole_rounds":
            rounds = max(1, num_microbatches // num_ranks)
            if num_microbatches % rounds:
                return (
                    f"it would run them in {rounds} rounds on {num_ranks} ranks, and needs the "
                    "same number of microbatches in each round"
                )
        return None

    def load_class(self) -> Any:
        """Imports and returns the schedule's class."""
        module, _, name = self.class_path.partition(":")
        return getattr(importlib.import_module(module), name)


# The layers of a compiled block cannot hand their weight gradients over (`deferred_linear.py`).
_REFUSED_BY_SPLIT_BACKWARD: tuple[Feature, ...] = ("compile",)

_ROWS = (
    Schedule(
        name="GPipe",
        class_path=f"{_TORCH}:ScheduleGPipe",
        stages_per_rank=1,
        allows_more_stages=False,
        placement="loop",
        microbatches="any",
        is_zero_bubble=False,
        # It runs the forward passes of all microbatches first.
        finishes_each_microbatch=False,
    ),
    Schedule(
        name="1F1B",
        class_path=f"{_TORCH}:Schedule1F1B",
        stages_per_rank=1,
        allows_more_stages=False,
        placement="loop",
        microbatches="at_least_stages",
        is_zero_bubble=False,
        finishes_each_microbatch=True,
    ),
    Schedule(
        name="Interleaved1F1B",
        class_path=f"{_TORCH}:ScheduleInterleaved1F1B",
        stages_per_rank=2,
        allows_more_stages=True,
        placement="loop",
        microbatches="whole_rounds",
        is_zero_bubble=False,
        finishes_each_microbatch=True,
    ),
    Schedule(
        name="InterleavedZeroBubble",
        class_path=f"{_TORCH}:ScheduleInterleavedZeroBubble",
        stages_per_rank=2,
        allows_more_stages=True,
        placement="loop",
        microbatches="whole_rounds",
        is_zero_bubble=True,
        # It begins as many microbatches as there are ranks before it computes weight gradients.
        finishes_each_microbatch=False,
        refuses=_REFUSED_BY_SPLIT_BACKWARD,
    ),
    Schedule(
        name="ZBVZeroBubble",
        class_path=f"{_TORCH}:ScheduleZBVZeroBubble",
        stages_per_rank=2,
        allows_more_stages=False,
        placement="v",
        microbatches="any",
        is_zero_bubble=True,
        finishes_each_microbatch=True,
        refuses=_REFUSED_BY_SPLIT_BACKWARD,
    ),
)

SCHEDULES: dict[str, Schedule] = {row.name: row for row in _ROWS}


def schedule_named(name: str) -> Schedule:
    """Returns the row of a schedule.

    Raises:
        ValueError: If no row has this name.
    """
    if name not in SCHEDULES:
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule must be one of {', '.join(SCHEDULES)}, got "
            f"{name!r}."
        )
    return SCHEDULES[name]


def schedules_with(feature: Feature) -> list[str]:
    """Returns the names of the schedules that can be combined with ``feature``."""
    return [row.name for row in _ROWS if feature not in row.refuses]
