# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Adds low-rank adapters to their targets: ``W + alpha / rank * B A``.

This happens with whole tensors, in the dtype in which they travel or are written, so that what
arrives at a server and what an export holds are equal bit for bit. The weights that are trained do
not change.
"""

from collections.abc import Iterator, Sequence

import torch

from torchtitan.grpo.upstream.state_dict import BaseStateDictAdapter
from torchtitan.grpo.weight_wire.adapter_names import FACTORS, is_adapter, module_of, target_of


def lora_scale(adapter: BaseStateDictAdapter) -> float:
    """Returns ``alpha / rank`` of a model's adapters; 0 if it has none."""
    return getattr(getattr(adapter, "model_args", None), "lora_scale", 0.0)


class AdapterMerge:
    """Adds the adapters in a stream of whole parameters, in which each follows its target's module.

    Args:
        scale: ``alpha / rank``.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._module = ""
        self._targets: dict[str, torch.Tensor] = {}
        self._rows: torch.Tensor | None = None

    def target(self, name: str, weight: torch.Tensor, shape: Sequence[int]) -> None:
        """Notes a parameter, until those of another module come.

        Args:
            name: Its native name.
            weight: Its elements, in memory that may be changed.
            shape: Its shape.
        """
        if module_of(name) != self._module:
            self._module, self._targets = module_of(name), {}
        self._targets[name] = weight.view(tuple(shape))

    def add(self, name: str, factor: torch.Tensor) -> None:
        """Takes a factor of the adapter; with the second one, the target is changed in place."""
        target = self._targets[target_of(name)]
        if name.endswith(FACTORS[0]):
            self._rows = factor
        else:
            assert self._rows is not None, f"{name} came before its other factor"
            target.addmm_(factor, self._rows, alpha=self._scale)
            self._rows = None


def with_adapters(
    parameters: Iterator[tuple[str, torch.Tensor]], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole parameters without adapters, which are added to copies of their targets.

    Args:
        parameters: Native names and whole parameters; an adapter follows its target's module.
        scale: ``alpha / rank``.
    """
    merge = AdapterMerge(scale)
    held: dict[str, torch.Tensor] = {}
    for name, full in parameters:
        if is_adapter(name):
            if name.endswith(FACTORS[0]):
                target = target_of(name)
                held[target] = held[target].clone()  # it may share the memory of what is trained
                merge.target(target, held[target], held[target].shape)
            merge.add(name, full)
            continue
        if held and module_of(name) != module_of(next(iter(held))):
            yield from held.items()
            held = {}
        held[name] = full
    yield from held.items()
