# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which activations of a pipeline rank are moved to the host, and when they return."""

import itertools
import statistics
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from torchtitan.grpo.pipeline.offload import ActivationOffload, Key
from torchtitan.grpo.pipeline.pass_timer import PassTimer
from torchtitan.grpo.pipeline.simulate import Simulation, simulate
from torchtitan.grpo.pipeline.tables.actions import Action, Table
from torchtitan.grpo.pipeline.tables.costs import Costs, StageCosts
from torchtitan.grpo.system.logs import logger

AUTO = -1
"""Value of ``grpo.pipeline_offload`` with which the measured bandwidth determines the share."""

_LINK_SHARE = 0.8
"""Share of a pass during which copies may use the link, so that small delays do not accumulate."""
_PROBE_BYTES = 64 * 2**20
_MEASURED_PASS = 2
"""Number of the pass that is timed. The first pass is not typical: it compiles kernels and allocates
memory."""


class OffloadPlan:
    """Plans and runs the offloading of one rank's activations.

    Args:
        device: Device on which the stages compute.
        share: ``grpo.pipeline_offload``.
        group: Process group of the pipeline's ranks.
    """

    def __init__(self, device: torch.device, share: float, group: dist.ProcessGroup) -> None:
        self.memory, self._device, self._share, self._group = (
            ActivationOffload(device), device, share, group,
        )  # fmt: skip
        self._away: set[Key] = set()
        self._next: dict[Key, Key] = {}
        self._num_passes = 0
        self._costs: Costs | None = None
        self._bandwidth = 0.0

    @property
    def measures(self) -> bool:
        """Whether the passes of the current step must be timed."""
        return self._share == AUTO and self._num_passes == _MEASURED_PASS

    def begin(self, table: Table, simulation: Simulation, rank: int) -> None:
        """Plans a step.

        Args:
            table: The passes.
            simulation: The simulation of the table with assumed costs.
            rank: This rank's number in the pipeline.
        """
        self._num_passes += 1
        self.memory.forget_all()
        actions = table.actions[rank]
        backward = [(a.stage, a.microbatch) for a in actions if a.kind in ("I", "B")]
        self._next = dict(itertools.pairwise(backward))
        if self._share != AUTO:
            kept = kept_for(actions, simulation)
            self._away = set(longest_kept(kept)[: int(self._share * len(kept))])
        elif self._costs is not None:
            exact = simulate(table, self._costs)
            self._away = hidden_by_link(
                kept_for(actions, exact), self.memory.saved_bytes, self._bandwidth, exact.makespan
            )

    def end(self, table: Table, timer: PassTimer) -> None:
        """Derives costs from a step that was timed; collective over the ranks of the pipeline."""
        of_ranks: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(of_ranks, timer.medians(), group=self._group)
        times = {key: seconds for of_rank in of_ranks for key, seconds in of_rank.items()}

        def cost(stage: int) -> StageCosts:
            forward, recompute, input_grad, weight_grad, both = (
                times.get((stage, kind), 0.0) for kind in ("F", "R", "I", "W", "B")
            )
            return StageCosts(
                forward, recompute + input_grad, weight_grad,
                full_backward=recompute + both if both else None, recompute=recompute,
            )  # fmt: skip

        self._costs = Costs(tuple(cost(stage) for stage in range(table.num_stages)))
        self._bandwidth = measured_bandwidth(self.memory, self._device)
        logger.info(
            "Activations of a microbatch that can be moved to host memory: "
            + ", ".join(
                f"stage {s}: {b / 2**20:.1f} MiB" for s, b in self.memory.saved_bytes.items()
            )
            + f". Copies run at {self._bandwidth / 1e9:.1f} GB/s (grpo.pipeline_offload)."
        )

    def forward(
        self, key: Key, module: nn.Module, inputs: Iterable[Any]
    ) -> AbstractContextManager[None]:
        """Returns the context of a forward pass."""
        self.memory.copies.release()
        if key in self._away:
            return self.memory.saving(key, module, inputs)
        if self.measures:
            return self.memory.saving(key, module, inputs, moves=False)
        return nullcontext()

    def before_backward(self, key: Key) -> None:
        """Starts to copy back the activations of the pass that begins and of the next one."""
        self.memory.fetch(key)
        if key in self._next:
            self.memory.fetch(self._next[key])

    def after_backward(self, key: Key) -> None:
        """Frees the host memory of a pass."""
        self.memory.forget(key)
        self.memory.copies.release()

    def finish(self) -> None:
        """Ends a step. All activations must have been copied back by then."""
        assert self.memory.host_bytes == 0, f"{self.memory.host_bytes} bytes were not fetched"
        self.memory.copies.release_all()


def kept_for(actions: Iterable[Action], simulation: Simulation) -> dict[Key, float]:
    """Returns for how long a rank keeps the activations of each of its forward passes."""
    begins = {
        (action.stage, action.microbatch): simulation.starts[action]
        for action in actions
        if action.kind in ("I", "B")
    }
    return {key: begins[key] - simulation.ends[Action(key[0], "F", key[1])] for key in begins}


def longest_kept(kept: dict[Key, float]) -> list[Key]:
    """Returns the passes whose activations are kept for some time, the longest time first."""
    return sorted((key for key, time in kept.items() if time > 0), key=lambda key: -kept[key])


def hidden_by_link(
    kept: dict[Key, float], saved_bytes: dict[int, int], bandwidth: float, seconds: float
) -> set[Key]:
    """Returns the passes whose activations the link can move while the rank computes.

    Args:
        kept: Time in seconds for which the activations of each pass are kept.
        saved_bytes: Bytes of a microbatch's activations, by stage.
        bandwidth: Bytes per second in each direction.
        seconds: Duration of the whole pass.
    """
    away: set[Key] = set()
    busy = 0.0
    for key in longest_kept(kept):
        copying = 2 * saved_bytes.get(key[0], 0) / bandwidth
        if busy + copying > _LINK_SHARE * seconds:
            break
        if copying < kept[key]:
            away.add(key)
            busy += copying
    return away


def measured_bandwidth(memory: ActivationOffload, device: torch.device) -> float:
    """Returns the bandwidth of copies between device and host in the slower direction.

    The unit is bytes per second.
    """
    tensor = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)

    def seconds(copy: Any) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    host = memory.copies.to_host(tensor)
    out = statistics.median(seconds(lambda: memory.copies.to_host(tensor)) for _ in range(3))
    back = statistics.median(seconds(lambda: memory.copies.to_device(host)) for _ in range(3))
    memory.copies.release_all()
    return _PROBE_BYTES / max(out, back)
