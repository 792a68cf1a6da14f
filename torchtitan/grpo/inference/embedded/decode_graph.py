# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decoding steps as CUDA graphs, because launching their kernels takes longer than running them.

A step that computes one token of each row and no prompt is captured once for each *bucket*, a
number of rows and a number of positions that attention reads, and replayed afterwards:

    rows        1, 2, 4, ..., up to the number of slots
    positions   128, 256, ..., up to the maximum length

Padding rows compute token 0 at position 0. Rows are dense, so the slots of padding rows are
free, and a request that gets such a slot later overwrites it.

A graph's inputs, the slots and the parameters must keep their addresses. When the slots grow, or
the server sleeps, all graphs are dropped. New weights are copied into the parameters (`weights.py`).

A step runs without a graph if attention would read many more positions than the step's rows have, as
with one long row among many short ones.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

import torch

from torchtitan.grpo.inference.embedded.attention import additive_mask
from torchtitan.grpo.inference.embedded.kv_cache import SlotCache
from torchtitan.grpo.inference.embedded.step_layout import RowRange, StepLayout
from torchtitan.grpo.system.device import new_stream

logger = logging.getLogger(__name__)

Compute = Callable[[], torch.Tensor]
Capture = Callable[[Compute, bool], Compute]
"""Returns a function that repeats a computation over the same memory, with the same output tensor.

The second argument says that no graph of an earlier call is in use any more.
"""

_MIN_LENGTH = 128
_MAX_GRAPHS = 32


class DecodeGraphs:
    """Captures and replays decoding steps in which attention reads at most ``max_in_vain`` unused positions."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor, StepLayout], torch.Tensor],
        cache: SlotCache,
        max_in_vain: int,
        capture: Capture,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._max_in_vain = max_in_vain
        self._capture: Capture | None = capture
        self._dtype = dtype
        # Ids and positions of the rows.
        self._inputs = torch.zeros(2, cache.max_slots, dtype=torch.long, device=device)
        # The graph that was used last is the last one.
        self._graphs: OrderedDict[tuple[int, int], Compute] = OrderedDict()
        self._generation = cache.generation

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, lengths: list[int]
    ) -> torch.Tensor | None:
        """Returns [rows, dim] hidden states, valid until the next step; None if no graph fits."""
        rows = bucket_of(len(lengths), 1, self._cache.max_slots)
        length = bucket_of(max(lengths), _MIN_LENGTH, self._cache.max_length)
        if self._capture is None or rows * length - sum(lengths) > self._max_in_vain:
            return None
        self._cache.reserve(rows, length)
        if self._generation != self._cache.generation:
            self._graphs.clear()
            self._generation = self._cache.generation
        self._inputs[0, : len(ids)].copy_(ids)
        self._inputs[1, : len(ids)].copy_(positions)
        if len(ids) < rows:
            self._inputs[:, len(ids) : rows].zero_()
        replay = self._graphs.pop((rows, length), None) or self._captured(rows, length)
        if replay is None:
            return None
        self._graphs[rows, length] = replay
        return replay()[: len(lengths)]

    def release(self) -> None:
        """Frees all graphs, and the memory that they share."""
        self._graphs.clear()

    def _captured(self, rows: int, length: int) -> Compute | None:
        assert self._capture is not None, "run has asked for it"
        if len(self._graphs) == _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        ids, positions = self._inputs[:, :rows]

        def compute() -> torch.Tensor:
            read = torch.arange(length, device=positions.device)
            mask = additive_mask(read > positions.unsqueeze(1), self._dtype)[:, None, None, :]
            return self._forward(ids, StepLayout(positions, [RowRange(0, rows, length, mask)]))

        try:
            return self._capture(compute, not self._graphs)
        except RuntimeError as error:
            logger.warning(
                "Decoding goes on without CUDA graphs, because a step of %d rows and %d positions "
                "was not captured: %s", rows, length, error,
            )  # fmt: skip
            self._capture = None
            self._graphs.clear()
            return None


def bucket_of(number: int, least: int, most: int) -> int:
    """Returns the smallest ``least * 2**k`` that is at least ``number``, but at most ``most``.

    >>> [bucket_of(n, 1, 6) for n in range(1, 7)]
    [1, 2, 4, 4, 6, 6]
    """
    while least < number:
        least *= 2
    return min(least, most)


class CudaCapture:
    """Captures CUDA graphs that share one memory pool.

    :class:`torch.cuda.graph` is not used, because it first waits for the whole device. That includes a
    broadcast of weights, which may wait for a trainer that has stopped.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute, is_first: bool) -> Compute:
        if is_first:
            # A pool whose graphs are all gone cannot be used again.
            self._pool = torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()  # loads modules and makes workspaces, which must not happen while capturing
            # Staging threads go on to pin, allocate and wait meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = compute()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
