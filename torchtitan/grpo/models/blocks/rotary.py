# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Rotary embeddings (https://arxiv.org/abs/2104.09864), which follow ``config.json``.

Scaled frequencies (linear, Llama 3.1, and YaRN, https://arxiv.org/abs/2309.00071) come from transformers.
"""

from dataclasses import dataclass
from typing import Any

import torch

# Scalings whose frequencies do not depend on the length of a sequence.
SCALINGS = ("linear", "llama3", "yarn")
_NAMES = ("rope_theta", "rope_type", "type")


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding. ``scaling`` describes the kind of scaling and its values.

    ``frequencies`` [head_dim / 2] are the angles in radians by which position 1 rotates the channel pairs.
    ``attention_factor`` multiplies sines and cosines, which scales attention scores by its square.
    """

    theta: float
    scaling: str
    frequencies: tuple[float, ...]
    attention_factor: float = 1.0

    def table(self, num_positions: int) -> torch.Tensor:
        """Returns [num_positions, 2 * head_dim] float32: cosines, then sines."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32)
        positions = torch.arange(num_positions, dtype=torch.float32)
        half = torch.outer(positions, frequencies)
        angles = torch.cat([half, half], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self.attention_factor


def read_rotary(config: dict[str, Any], head_dim: int) -> Rotary:
    """Reads the keys of transformers 4 or 5. Raises ValueError if a scaling is unknown or incomplete."""
    parameters = dict(config.get("rope_parameters") or {})
    parameters |= config.get("rope_scaling") or {}
    # Version 4 of transformers wrote the base beside the scaling, and first called it `type`.
    theta = float(parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0)))
    scaling = parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor must be 1: all channels of a head are rotated.")
    if scaling == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return Rotary(theta, scaling, tuple((1.0 / theta**exponents).tolist()))
    if scaling not in SCALINGS:
        raise ValueError(
            f"rope type {scaling!r} is not supported. Supported rope types: default, "
            f"{', '.join(SCALINGS)}. Remove the rope scaling to train at the model's original length."
        )
    frequencies, factor = _scaled(scaling, parameters, config, head_dim)
    values = {k: v for k, v in sorted(parameters.items()) if k not in _NAMES and v is not None}
    described = f"{scaling} ({', '.join(f'{name} = {value}' for name, value in values.items())})"
    return Rotary(theta, described, tuple(frequencies.tolist()), factor)


def _scaled(
    scaling: str, parameters: dict[str, Any], config: dict[str, Any], head_dim: int
) -> tuple[torch.Tensor, float]:
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    known = {key: config[key] for key in sizes}
    try:
        described = PretrainedConfig.from_dict(
            known | {"rope_parameters": parameters, "head_dim": head_dim}
        )
        return ROPE_INIT_FUNCTIONS[scaling](described, torch.device("cpu"))
    except KeyError as error:  # its message lists what is missing
        raise ValueError(f"rope type {scaling!r} is incomplete: {error.args[0]}") from error


def rotate(heads: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotates [rows, seq, heads, head_dim] by cosines and sines [rows, seq, 1, 2 * head_dim]."""
    cosines, sines = rotary.chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
