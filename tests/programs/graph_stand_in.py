# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A graph of operations on the CPU, in place of a CUDA graph."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan.grpo.inference.embedded.decode_graph import Compute


class TracedGraphs:
    """Traces a computation into aten operations, and repeats these over the same tensors.

    As with a CUDA graph, no line of the computation's Python runs again, and its inputs are the
    tensors that it read when it was captured.
    """

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def __call__(self, compute: Compute, is_first: bool) -> Compute:
        output = compute().clone()
        traced = make_fx(compute)()
        self.num_captured += 1

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            return output.copy_(traced())

        return replay
