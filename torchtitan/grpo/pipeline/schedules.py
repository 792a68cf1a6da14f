# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The pipeline schedules that ``parallelism.pipeline_parallel_schedule`` may name, one row each.

Adding a schedule means adding a row (docs/how-to/extend.md). This module does not import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.grpo.pipeline.tables import rules, v_family
from torchtitan.grpo.pipeline.tables.actions import Costs, Placement, Table
from torchtitan.grpo.pipeline.tables.helix import helix

AUTO = "auto"
"""The name with which the fastest schedule is chosen from measured times."""

HELIX = "Helix"
"""The name of the schedule whose stages are parts of layers."""

AUTO_CANDIDATES = (
    "1F1B",
    "Interleaved1F1B",
    "ZBH1",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "VZB",
    "VHalf",
    "VMin",
    "ZBH2",
    HELIX,
)
"""Among equally fast schedules, the first one is chosen."""


@dataclass(frozen=True)
class Schedule:
    """One row of the table of schedules.

    Attributes:
        make_table: Makes a table, given the numbers of ranks and microbatches and all stages' costs.
        stages_per_rank: Number of stages of each rank; with ``allows_more_stages`` the minimum.
        allows_more_stages: Whether ``parallelism.pipeline_parallel_layers_per_stage`` may
            divide the model into more stages, the same number on each rank.
        finishes_each_microbatch: Whether the last stage runs each microbatch backward through the
            output layer before the next one forward, so that both can use the same memory for logits.
        allows_one_stage: Whether each rank may hold a single stage even if the minimum is higher.

    With the placement ``helix``, stages are the parts of `tables/helix.py`, two for each layer and
    one more, and ``stages_per_rank`` is not used.
    """

    name: str
    make_table: Callable[[int, int, Costs], Table]
    stages_per_rank: int
    placement: Placement
    allows_more_stages: bool = False
    is_zero_bubble: bool = False
    finishes_each_microbatch: bool = True
    allows_one_stage: bool = False

    @property
    def stages_in_words(self) -> str:
        if self.allows_more_stages:
            least = 1 if self.allows_one_stage else self.stages_per_rank
            return f"the same number of stages, at least {least},"
        return f"exactly {self.stages_per_rank} stage{'s' if self.stages_per_rank > 1 else ''}"

    @property
    def divides_layers(self) -> bool:
        """Whether stages are parts of layers, instead of one or more whole layers."""
        return self.placement == "helix"

    @property
    def turns_second(self) -> bool:
        """True if the stages of a second trained model go from the last rank to the first.

        The second model's passes then begin on the ranks that still wait for the first model's. With
        split backward passes, ranks hardly wait, and the opposite direction would not save time.
        """
        return not (self.is_zero_bubble or self.divides_layers)

    def allows_stages(self, total_stages: int, num_ranks: int) -> bool:
        if self.divides_layers:
            return total_stages % 2 == 1 and total_stages // 2 + 1 >= num_ranks
        per_rank, rest = divmod(total_stages, num_ranks)
        if rest != 0:
            return False
        return (
            per_rank == self.stages_per_rank
            or (self.allows_more_stages and per_rank > self.stages_per_rank)
            or (self.allows_one_stage and per_rank == 1)
        )


def _one_stage(name: str, make_table: Callable[[int, int], Table], **traits: bool) -> Schedule:
    return Schedule(
        name, lambda ranks, microbatches, _: make_table(ranks, microbatches), 1, "loop", **traits
    )


def _interleaved(name: str, *, is_zero_bubble: bool) -> Schedule:
    return Schedule(
        name,
        lambda ranks, microbatches, costs: rules.interleave(
            ranks, microbatches, len(costs.stages) // ranks, splits_backward=is_zero_bubble
        ),
        stages_per_rank=2,
        placement="loop",
        allows_more_stages=True,
        is_zero_bubble=is_zero_bubble,
    )


def _v(name: str, make_table: Callable[[int, int, Costs], Table]) -> Schedule:
    return Schedule(name, make_table, 2, "v", is_zero_bubble=True)


_ROWS = (
    _one_stage("GPipe", rules.gpipe, finishes_each_microbatch=False),
    _one_stage("1F1B", rules.one_forward_one_backward),
    _one_stage("ZBH1", rules.zb_h1, is_zero_bubble=True),
    _one_stage("ZBH2", rules.zb_h2, is_zero_bubble=True),
    _interleaved("Interleaved1F1B", is_zero_bubble=False),
    _interleaved("InterleavedZeroBubble", is_zero_bubble=True),
    _v("ZBVZeroBubble", lambda ranks, microbatches, _: rules.zbv(ranks, microbatches)),
    _v("VMin", v_family.v_min),
    _v("VHalf", v_family.v_half),
    _v("VZB", v_family.v_zb),
    Schedule(HELIX, helix, stages_per_rank=0, placement="helix"),
    # `auto.py` replaces this name with that of another row before a pipeline is built.
    Schedule(
        AUTO,
        lambda ranks, microbatches, costs: measured_with(len(costs.stages) // ranks).make_table(
            ranks, microbatches, costs
        ),
        stages_per_rank=2,
        placement="v",
        allows_more_stages=True,
        is_zero_bubble=True,
        allows_one_stage=True,
    ),
)

SCHEDULES: dict[str, Schedule] = {row.name: row for row in _ROWS}
LAYER_SCHEDULES = {name: row for name, row in SCHEDULES.items() if not row.divides_layers}
"""Schedules whose stages are whole layers."""


def candidates(num_ranks: int, total_stages: int | None = None) -> list[Schedule]:
    """Returns the schedules among which ``auto`` chooses, except Helix, which is measured separately.

    If ``total_stages`` is None, schedules with any number of stages are returned.
    """
    rows = (LAYER_SCHEDULES[name] for name in AUTO_CANDIDATES if name != HELIX)
    return [
        row for row in rows if total_stages is None or row.allows_stages(total_stages, num_ranks)
    ]


def assumed_microbatches(num_ranks: int) -> int:
    """Returns how many microbatches per optimizer step and pipeline ``auto`` assumes.

    The actual number in a step depends on the lengths of the completions.
    """
    return 4 * num_ranks


def measured_with(stages_per_rank: int) -> Schedule:
    """Returns the schedule with which ``auto`` measures costs; it splits backward passes into I and W."""
    names = {1: "ZBH1", 2: "ZBVZeroBubble"}
    return SCHEDULES[names.get(stages_per_rank, "InterleavedZeroBubble")]
