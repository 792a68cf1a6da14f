# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Names of a decoder's parameters on disk and on servers, where they are Hugging Face's.

`blocks/parts.py` has the names of a layer's weights, with ``{}`` for the number of an expert. Parameters
have the same layout as on disk, so that a push only renames them. Experts are views of one stacked tensor.
"""

from functools import cached_property
from typing import Any, Protocol

import torch

from torchtitan.grpo.models.blocks.parts import Layer
from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.weight_wire.model_files import EMBEDDING, OUTPUT

_LAYER, _LAYER_ON_DISK = "layers.", "model.layers."


class StateDictAdapter(Protocol):
    """Renames a model's state dict to the names on disk and on servers, and back."""

    model_args: DecoderArgs

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]: ...

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]: ...


class DecoderAdapter:
    output = OUTPUT

    def __init__(self, model_args: Any, hf_assets_path: str | None) -> None:
        self.model_args: DecoderArgs = model_args
        self.hf_assets_path = hf_assets_path

    @cached_property
    def _ends(self) -> dict[str, str]:
        return {
            "tok_embeddings.weight": EMBEDDING,
            "norm.weight": "model.norm.weight",
            "output.weight": self.output,
        }

    @cached_property
    def _of_kinds(self) -> list[dict[str, str]]:
        return [names_of(kind) for kind in self.model_args.layers.kinds]

    def _on_disk(self, name: str) -> str | None:
        """Returns a parameter's name on disk, with ``{}`` for the number of an expert, or None without one."""
        if not name.startswith(_LAYER):
            is_tied = self.model_args.enable_weight_tying and name == "output.weight"
            return None if is_tied else self._ends.get(name)
        number, _, rest = name.removeprefix(_LAYER).partition(".")
        disk = self._of_kinds[self.model_args.layers.order[int(number)]].get(rest)
        return None if disk is None else f"{_LAYER_ON_DISK}{number}.{disk}"

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in state_dict.items():
            disk = self._on_disk(name)
            if disk is None:
                continue
            if "{}" in disk:
                found |= {disk.format(i): expert for i, expert in enumerate(value.unbind(0))}
            else:
                found[disk] = value
        return found

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, disk in self._all_names:
            if "{}" not in disk:
                if disk in hf_state_dict:
                    found[name] = hf_state_dict[disk]
            elif disk.format(0) in hf_state_dict:
                parts, number = [], 0
                while (part := hf_state_dict.get(disk.format(number))) is not None:
                    parts.append(part)
                    number += 1
                found[name] = torch.stack(parts)
        return found

    @cached_property
    def _all_names(self) -> list[tuple[str, str]]:
        layers = self.model_args.layers
        names = [*self._ends]
        for number, kind in enumerate(layers.order):
            names += [f"{_LAYER}{number}.{rest}" for rest in self._of_kinds[kind]]
        return [(name, disk) for name in names if (disk := self._on_disk(name)) is not None]


def names_of(layer: Layer) -> dict[str, str]:
    """Returns the names of a layer's parameters, mapped to their names in the layer on disk."""
    return dict(pair for part in layer.parts for pair in part.names)


class ValueAdapter(DecoderAdapter):
    """The state-dict adapter of a critic, whose head is named as in reward models."""

    output = "score.weight"
