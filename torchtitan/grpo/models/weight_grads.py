# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Stores the tensors from which weight gradients are computed later.

Zero-bubble schedules run the backward pass of a stage in two actions, I and W. In this package, I is
a whole backward pass in which linear layers put their input and the gradient of their output into
the store. W takes these tensors out and multiplies them. The store keeps the following invariants:

- After each ``put``, the stored tensors occupy at most ``max_pending_bytes``. If they occupy more,
  the oldest products are computed immediately, and the W action to which they belong has less to do.
- Products of one parameter are added to its gradient in the order in which they were put.
- The store is empty after each step of the schedule.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

Key = tuple[int, int]
"""Stage and microbatch of a backward pass."""

AddGradient = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds a gradient, the second argument, to the gradient of a parameter, the first argument."""


Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes a weight's gradient from the gradient of the layer's output and the layer's input."""


def multiply_linear(output_grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Returns the gradient [out, in] of a linear layer's weight.

    Args:
        output_grad: [..., out].
        input: [..., in].
    """
    # Operands and their order are the same as in autograd, so that the result is bitwise equal.
    return output_grad.flatten(0, -2).t().mm(input.flatten(0, -2))


@dataclass(frozen=True)
class _Product:
    """The factors of one weight's gradient.

    Attributes:
        weight: The parameter.
        input: The layer's input.
        output_grad: The gradient of the layer's output.
        add: Adds the product to the parameter's gradient.
        multiply: Multiplies the factors.
    """

    weight: torch.Tensor
    input: torch.Tensor
    output_grad: torch.Tensor
    add: AddGradient
    multiply: Multiply

    def run(self) -> None:
        self.add(self.weight, self.multiply(self.output_grad, self.input))


class WeightGradients:
    """The pending products of all stages of a rank.

    The store does not belong to a particular thread, because backward passes on a GPU run in a thread
    of the device.

    Args:
        max_pending_bytes: Bound on the memory that pending products may hold. None sets no bound.
    """

    def __init__(self, max_pending_bytes: int | None = None) -> None:
        self.max_pending_bytes = max_pending_bytes
        self.pending_bytes = self.peak_bytes = 0
        self._catching: tuple[Key, AddGradient] | None = None
        self._pending: dict[Key, deque[_Product]] = {}
        self._holders: dict[int, int] = {}

    @property
    def is_catching(self) -> bool:
        """Whether linear layers must put their factors into the store."""
        return self._catching is not None

    @contextmanager
    def catching(self, key: Key, add: AddGradient) -> Iterator[None]:
        """Makes forward and backward passes inside the context use the store.

        A checkpoint recomputes its block in the backward pass, so the backward pass must also run in
        such a context.
        """
        assert self._catching is None, "a pass of a stage began inside the pass of another stage"
        self._catching = key, add
        try:
            yield
        finally:
            self._catching = None

    def put(
        self,
        weight: torch.Tensor,
        input: torch.Tensor,
        output_grad: torch.Tensor,
        multiply: Multiply = multiply_linear,
    ) -> None:
        """Stores the factors of a weight's gradient; called in the backward pass."""
        assert self._catching is not None, "a deferred backward pass ran outside its context"
        key, add = self._catching
        product = _Product(weight, input.detach(), output_grad.detach(), add, multiply)
        self._pending.setdefault(key, deque()).append(product)
        self._count(product, 1)
        bound = self.max_pending_bytes
        while bound is not None and self.pending_bytes > bound:
            self._run_first(next(iter(self._pending)))
        self.peak_bytes = max(self.peak_bytes, self.pending_bytes)

    def run(self, key: Key) -> None:
        """Computes the pending weight gradients of a stage and microbatch."""
        while key in self._pending:
            self._run_first(key)

    def waits(self, key: Key) -> bool:
        """Returns whether weight gradients of a stage and microbatch are pending."""
        return key in self._pending

    def check_empty(self) -> None:
        """Asserts that no product is pending, because it would be lost at the end of a step."""
        assert not self._pending, f"Weight gradients of {list(self._pending)} were not computed."
        assert self.pending_bytes == 0, f"{self.pending_bytes} bytes are still counted as pending."

    @torch.no_grad()
    def _run_first(self, key: Key) -> None:
        products = self._pending[key]
        product = products.popleft()
        if not products:
            del self._pending[key]
        product.run()
        self._count(product, -1)

    def _count(self, product: _Product, change: int) -> None:
        """Updates the number of pending bytes.

        Memory that several products share, such as the input of q, k and v, is counted once.
        """
        for tensor in (product.input, product.output_grad):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            before = self._holders.get(storage._cdata, 0)
            after = before + change
            if before == 0 or after == 0:
                self.pending_bytes += change * storage.nbytes()
            if after:
                self._holders[storage._cdata] = after
            else:
                del self._holders[storage._cdata]
