# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Upstream's Qwen3 model with the parts that other families need.

Weights have the form of Hugging Face directories, so that a push only renames them. Rotary
embeddings (https://arxiv.org/abs/2104.09864) follow ``config.json``; transformers computes
scaled ones: linear, Llama 3.1's, and YaRN (https://arxiv.org/abs/2309.00071).

With tied embeddings, the first and the last pipeline stage each hold a copy of the weight. In
the last stage an embedding that embeds nothing owns it, so that both copies have the same name
in pushes, exports and checkpoints. `training/gradient_norm.py` keeps them equal.
"""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchtitan.grpo.config import LoRA
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.system.device import disable_fsdp_gradient_division
from torchtitan.grpo.upstream.models import (
    Qwen3Model,
    Qwen3ModelArgs,
    Qwen3StateDictAdapter,
    TransformerBlock,
)

# Scalings whose frequencies do not depend on the length of a sequence.
SCALINGS = ("linear", "llama3", "yarn")
_NAMES = ("rope_theta", "rope_type", "type")


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding, whose ``scaling`` is a name with values.

    ``frequencies`` [head_dim / 2] are the radians of channel pairs at position 1.
    ``attention_factor`` multiplies sines and cosines, and so scales the attention's scores.
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
    """Reads either of transformers' spellings; ValueError if a scaling is unknown or incomplete."""
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


_QKV = (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"))


@dataclass
class DecoderArgs(Qwen3ModelArgs):
    """The embedding ``rotary`` is read instead of upstream's ``rope_theta``."""

    qkv_bias: bool = False
    rotary: Rotary = field(default_factory=lambda: Rotary(1e4, "default", ()))
    dense_layers: tuple[int, ...] = ()
    lora_scale: float = 0.0

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        self.max_seq_len = job_config.training.seq_len
        lora: LoRA = job_config.lora  # pyright: ignore[reportAttributeAccessIssue]
        self.lora_scale = lora.alpha / lora.rank if lora.rank else 0.0


class Decoder(Qwen3Model):
    model_args: DecoderArgs

    def __init__(self, model_args: DecoderArgs) -> None:
        super().__init__(model_args)
        dense = replace(model_args, moe_enabled=False)
        for layer in model_args.dense_layers:
            self.layers[str(layer)] = TransformerBlock(layer, dense)
        if model_args.qkv_bias:
            for projection in self._biased():
                projection.bias = nn.Parameter(torch.empty(projection.out_features))

    def _biased(self) -> list[nn.Linear]:
        if not self.model_args.qkv_bias:
            return []
        blocks: list[Any] = list(self.layers.values())
        found = [getattr(block.attention, name) for block in blocks for name, _ in _QKV]
        return [linear for linear in found if linear is not None]  # parts of layers may lack them

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        tied = self.enable_weight_tying
        # Leaving the meta device has undone the tie. Upstream restores it, but a pipeline stage may
        # have only one of the two layers, or none.
        self.enable_weight_tying = tied and None not in (self.tok_embeddings, self.output)
        super().init_weights(cast(torch.device, buffer_device))
        self.enable_weight_tying = tied
        for projection in self._biased():
            nn.init.zeros_(projection.bias)

    def _precompute_rope_cache(self) -> torch.Tensor:
        return self.model_args.rotary.table(self.model_args.max_seq_len)


class DecoderAdapter(Qwen3StateDictAdapter):
    def __init__(self, model_args: DecoderArgs, hf_assets_path: str | None) -> None:
        # Upstream would read the directory's index, and fails if that names no numbered files.
        super().__init__(model_args, None)
        self.hf_assets_path = hf_assets_path
        for native, hf in _QKV:
            hf_name = f"model.layers.{{}}.self_attn.{hf}.bias"
            self.from_hf_map[hf_name] = f"layers.{{}}.attention.{native}.bias"


class ValueAdapter(DecoderAdapter):
    """For a critic, whose head has the name of a reward model's."""

    def __init__(self, model_args: DecoderArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        del self.from_hf_map["lm_head.weight"]
        self.from_hf_map["score.weight"] = "output.weight"


class OutputEmbedding(nn.Embedding):
    """Holds the weight of the last stage's output layer under the embedding's name."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return hidden


def is_tied(model: nn.Module) -> bool:
    """Returns whether the whole model, of which this may be a stage, has tied embeddings."""
    return bool(getattr(model, "enable_weight_tying", False))


def embeds_tokens(model: nn.Module) -> bool:
    """Returns whether the model, or this stage of it, takes tokens and not hidden states."""
    embeddings = model.tok_embeddings
    return embeddings is not None and not isinstance(embeddings, OutputEmbedding)


def hold_output_embedding(stage: nn.Module) -> None:
    """Lets the last stage of a tied model, on the meta device, hold the weight."""
    output: Any = stage.output
    vocab, dim = output.weight.shape
    stage.tok_embeddings = OutputEmbedding(vocab, dim, _weight=output.weight)
    stage.tok_embeddings.weight = output.weight


def tie_again(model: nn.Module) -> None:
    """Ties embedding and output layer after tensor parallelism has replaced the shared weight."""
    embeddings: Any = model.tok_embeddings
    output: Any = model.output
    if not is_tied(model) or embeddings is None or output is None:
        return
    if isinstance(embeddings, OutputEmbedding):  # not sharded
        embeddings.weight = output.weight
    else:
        output.weight = embeddings.weight


def apply_fsdp_tied(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    reshard_after_forward_policy: str = "default",
) -> None:
    """Applies FSDP2, as upstream's ``apply_fsdp``, to a tied, dense model or to a stage of one."""
    reshards = {"always": True, "never": False, "default": not pp_enabled}
    config: dict[str, Any] = {
        "mesh": dp_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        "reshard_after_forward": reshards[reshard_after_forward_policy],
    }
    for block in model.layers.values():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        fully_shard(block, **config)  # pyright: ignore
    # The group is used first and last in a forward pass: resharding would gather it twice.
    ends = [m for m in (model.tok_embeddings, model.norm, model.output) if m is not None]
    if ends:
        fully_shard(ends, **(config | {"reshard_after_forward": False}))  # pyright: ignore
    fully_shard(model, **config)
    disable_fsdp_gradient_division(model)
