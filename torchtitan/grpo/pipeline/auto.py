# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses a V schedule by the measured times of each stage's passes.

The first pass of a pipeline infers shapes and warms up. The second one is measured; then every rank
knows the times of all stages, simulates the V schedules within the bound of memory, and takes the
fastest one. All later passes run the tables that it makes for these times.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from torchtitan.grpo.pipeline.choice import choose, describe, predict
from torchtitan.grpo.pipeline.draw import draw_picture, draw_text
from torchtitan.grpo.pipeline.lean_stage import LeanStage
from torchtitan.grpo.pipeline.pass_timer import PassTimer
from torchtitan.grpo.pipeline.schedules import SCHEDULES
from torchtitan.grpo.pipeline.table_schedule import TableSchedule
from torchtitan.grpo.pipeline.tables.actions import Kind, Table
from torchtitan.grpo.pipeline.tables.costs import Costs, StageCosts

_MEASURED_PASS = 2


class AutoSchedule(TableSchedule):
    """Runs ZBVZeroBubble until it has measured, and the fastest V schedule from then on.

    Args:
        stages: Stages of this rank, in V placement.
        costs: Assumed costs, for the first passes.
        loss: See :class:`TableSchedule`.
        memory: Bound of the activations, as a share of those that 1F1B holds.
        folder: Where rank 0 writes ``pipeline_schedule.txt`` and ``pipeline_schedule.png``.
    """

    def __init__(
        self, stages: list[LeanStage], costs: Costs, loss: Any, memory: float, folder: Path
    ) -> None:
        self._num_ranks = len(costs.stages) // 2
        super().__init__(stages, self._tables_of("ZBVZeroBubble", costs), costs, loss)
        self._memory, self._folder, self._num_passes = memory, folder, 0
        self.chosen: str | None = None

    def run(self, inputs: Sequence[Any], *arguments: Any, **named: Any) -> list[Any]:
        self._num_passes += 1
        if self._num_passes != _MEASURED_PASS:
            return super().run(inputs, *arguments, **named)
        timer = PassTimer(self.stages[0].device)
        for stage in self.stages:
            stage.timer = timer
        outputs = super().run(inputs, *arguments, **named)
        for stage in self.stages:
            stage.timer = None
        self._choose(measured_costs(timer, len(self.stage_index_to_group_rank)), len(inputs))
        return outputs

    def _choose(self, costs: Costs, num_microbatches: int) -> None:
        tried = predict(costs, num_microbatches)
        self.chosen = choose(tried, self._memory, self._num_ranks)
        self.use_tables(self._tables_of(self.chosen, costs), costs)
        if dist.get_rank() == 0:
            report = describe(tried, self.chosen, costs, num_microbatches)
            logger.info(report)
            table, simulation = tried[self.chosen]
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / "pipeline_schedule.txt"
            file.write_text(f"{report}\n\n{draw_text(table, simulation)}\n")
            titles = {f"{name}: idle {s.bubble:.1%}": (t, s) for name, (t, s) in tried.items()}
            draw_picture(titles, self._folder / "pipeline_schedule.png", "seconds")

    def _tables_of(self, name: str, costs: Costs) -> Callable[[int], Table]:
        return lambda count: SCHEDULES[name].make_table(self._num_ranks, count, 2, costs)


def measured_costs(timer: PassTimer, num_stages: int) -> Costs:
    """Returns the times of all stages. Collective over all ranks of the run.

    Ranks that hold the same stage in other data-parallel groups are averaged, because all of them
    must run the same table: FSDP's collectives connect them.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, timer.medians())

    def mean(stage: int, kind: Kind) -> float:
        found = [times[stage, kind] for times in of_ranks if (stage, kind) in times]
        assert found, f"No rank has measured {kind} of stage {stage}."
        return sum(found) / len(found)

    return Costs(
        tuple(
            StageCosts(mean(s, "F"), mean(s, "I"), mean(s, "W"), activation=0.5, pending=0.5)
            for s in range(num_stages)
        )
    )
