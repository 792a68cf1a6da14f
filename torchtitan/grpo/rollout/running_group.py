# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A prompt group while its completions are being generated."""

import asyncio
from dataclasses import dataclass

from torchtitan.grpo.rollout.trajectory import Trajectory
from torchtitan.grpo.types import Generation, Prompt


@dataclass(eq=False)
class RunningGroup:
    """A prompt group with the completions that are still being generated.

    ``kept`` are completions that were already finished when the run was resumed. ``task`` waits
    for the completions and then judges the group. It is ``None`` once they have ended: from
    then on the group can no longer be cancelled.
    """

    prompt: Prompt
    trajectories: list[Trajectory]
    kept: tuple[Generation, ...]
    task: asyncio.Task[None] | None = None

    def done(self) -> tuple[Generation, ...]:
        results = (trajectory.result() for trajectory in self.trajectories)
        return (*self.kept, *(result for result in results if result is not None))

    def begun(self) -> tuple[Generation, ...]:
        """Returns the generated parts of the completions that are not finished.

        Those that are cancelled, because the run is about to stop, count as well.
        """
        running = (
            t.so_far
            for t in self.trajectories
            if not t.task.done() or (t.task.cancelled() and not t.is_cut)
        )
        return tuple(so_far for so_far in running if so_far is not None)

    def cut(self) -> int:
        """Ends all unfinished completions, which keep what was generated. Returns their number."""
        running = [t for t in self.trajectories if not (t.task.done() or t.is_cut)]
        for trajectory in running:
            trajectory.cut()
        return len(running)

    def cancel(self) -> None:
        for trajectory in self.trajectories:
            trajectory.task.cancel()
        if self.task is not None:
            self.task.cancel()
