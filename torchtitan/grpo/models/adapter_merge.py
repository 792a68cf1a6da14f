# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Adds low-rank adapters to their targets: ``W + alpha / rank * B A``.

This happens with whole tensors, in the dtype in which they travel or are written, so that what
arrives at a server and what an export holds are equal bit for bit. The weights that are trained do
not change.
"""

from collections.abc import Iterator, Sequence

import torch
from torchtitan.protocols import BaseStateDictAdapter

from torchtitan.grpo.weight_wire.adapter_names import FACTORS, is_adapter, target_of


def lora_scale(adapter: BaseStateDictAdapter) -> float:
    """Returns ``alpha / rank`` of a model's adapters; 0 if it has none."""
    return getattr(getattr(adapter, "model_args", None), "lora_scale", 0.0)


class AdapterMerge:
    """Adds the adapters in a stream of whole parameters, in which each follows its target.

    Args:
        scale: ``alpha / rank``.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._name = ""
        self._target: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    def target(self, name: str, weight: torch.Tensor, shape: Sequence[int]) -> None:
        """Notes the parameter that came last.

        Args:
            name: Its native name.
            weight: Its elements, in memory that may be changed.
            shape: Its shape.
        """
        self._name, self._target, self._rows = name, weight.view(tuple(shape)), None

    def add(self, name: str, factor: torch.Tensor) -> None:
        """Takes a factor of the adapter; with the second one, the target is changed in place."""
        assert self._target is not None and target_of(name) == self._name, (name, self._name)
        if name.endswith(FACTORS[0]):
            self._rows = factor
        else:
            assert self._rows is not None, f"{name} came before its other factor"
            self._target.addmm_(factor, self._rows, alpha=self._scale)


def with_adapters(
    parameters: Iterator[tuple[str, torch.Tensor]], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole parameters without adapters, which are added to copies of their targets.

    Args:
        parameters: Native names and whole parameters; an adapter follows its target.
        scale: ``alpha / rank``.
    """
    held: tuple[str, torch.Tensor] | None = None
    merge = AdapterMerge(scale)
    for name, full in parameters:
        if not is_adapter(name):
            if held is not None:
                yield held
            held = name, full
            continue
        assert held is not None, f"{name} came before its target"
        if name.endswith(FACTORS[0]):
            held = held[0], held[1].clone()  # it may share the memory of what is trained
            merge.target(held[0], held[1], held[1].shape)
        merge.add(name, full)
    if held is not None:
        yield held
