# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the trainer's own weights say of fixed tokens, for servers to be compared with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn as nn

from torchtitan.grpo.data.feed import Feed
from torchtitan.grpo.data.rows import Sample, TrainRows, build_rows
from torchtitan.grpo.models.logprob_head import LogprobHead
from torchtitan.grpo.training.runner import ForwardRunner


class PolicyProbe:
    """Rates fixed tokens with the weights of now, in whatever layout they lie.

    A forward pass over one set of microbatches, on the training thread of all ranks: it
    waits for no server.

    Args:
        runner: Of the trained model.
        model_parts: Of this rank.
        feed: To rank 0.
        tokens: What is rated.
        num_rows: Of the forward pass.
        row_len: Of each of them, at least as long as ``tokens``.
        device: The training device.
        speaks: True on the one rank whose result counts; it sees the output.
    """

    def __init__(
        self,
        runner: ForwardRunner,
        model_parts: Sequence[nn.Module],
        feed: Feed,
        tokens: Sequence[int],
        *,
        num_rows: int,
        row_len: int,
        device: torch.device,
        speaks: bool,
    ) -> None:
        self._runner, self._feed, self._speaks = runner, feed, speaks
        self._heads = [m for p in model_parts for m in p.modules() if isinstance(m, LogprobHead)]
        self._rows = probe_rows(tokens, num_rows, row_len).to(device)
        self._num_rated = len(tokens) - 1

    def logprobs(self) -> list[float]:
        """[len(tokens) - 1], at temperature 1; on every rank. Collective over all ranks."""
        with _untempered(self._heads):
            output = self._runner.forward(self._rows)
        rated = torch.zeros(self._num_rated, dtype=torch.float64)
        if self._speaks:
            assert output is not None
            rated += output[0, : self._num_rated, 0].cpu()
        return self._feed.all_reduce_sum(rated).tolist()


def probe_rows(tokens: Sequence[int], num_rows: int, row_len: int) -> TrainRows:
    """The tokens at the beginning of the first row, and padding."""
    ids = np.asarray(tokens, np.int32)
    nothing = np.zeros(len(ids) - 1, np.float32)
    sample = Sample(ids[:1], ids[1:], nothing)
    return build_rows([sample], [[0], *([] for _ in range(num_rows - 1))], row_len)


@contextmanager
def _untempered(heads: Sequence[LogprobHead]) -> Iterator[None]:
    temperatures = [head.temperature for head in heads]
    for head in heads:
        head.temperature = 1.0
    try:
        yield
    finally:
        for head, temperature in zip(heads, temperatures, strict=True):
            head.temperature = temperature
