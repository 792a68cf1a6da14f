# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Forward passes whose results are needed later."""

import torch

from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.training.runner import ForwardRunner


class ForwardJob:
    """Rows whose logprobs under a model are needed by a later training pass.

    A pipeline runs as many of the rows as fit into the gaps of earlier training passes, from the
    first one on. The rest is computed when the logprobs are asked for.

    Args:
        runner: Runs the model.
        rows: The rows on the training device.
    """

    def __init__(self, runner: ForwardRunner, rows: TrainRows) -> None:
        self.runner = runner
        self._rows = rows
        self._num_done = 0
        self._outputs: list[torch.Tensor] = []

    @property
    def is_done(self) -> bool:
        """Whether no row waits."""
        return self._num_done == self._rows.num_rows

    @property
    def waiting(self) -> TrainRows:
        """The rows that have not been computed."""
        return self._rows.select(slice(self._num_done, None))

    def add(self, num_rows: int, outputs: list[torch.Tensor]) -> None:
        """Notes that further rows have been computed.

        Args:
            num_rows: Number of these rows.
            outputs: Their outputs, [rows, seq, 2] together; empty if this rank does not see them.
        """
        self._num_done += num_rows
        self._outputs += outputs

    def finish(self) -> None:
        """Computes the rows that wait. Collective over the ranks of the model."""
        if not self.is_done:
            waiting = self.waiting
            output = self.runner.forward(waiting)
            self.add(waiting.num_rows, [] if output is None else [output])

    def logprobs(self) -> torch.Tensor | None:
        """Returns [rows, seq] float32; None on ranks that do not see the output.

        Computes the rows that wait. Collective over the ranks of the model.
        """
        self.finish()
        return torch.cat(self._outputs)[..., 0] if self.runner.has_output else None
