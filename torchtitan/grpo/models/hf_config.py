# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads a Hugging Face directory's ``config.json`` into torchtitan's model arguments.

Torchtitan chooses models by named flavors. Here the directory alone describes the model. A
variant that upstream's model code does not implement is refused by name: a model that loads but
computes something else than the server does would show only as a mismatch between the
trainer's and the sampling-time logprobs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.models.llama3 import get_train_spec as llama3_train_spec
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import get_train_spec as qwen3_train_spec
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan.grpo.models.config_sizes import wrong_size
from torchtitan.grpo.models.eos_tokens import NoEosTokenError, eos_token_ids


class ModelError(ValueError):
    """A model directory cannot be used; the message gives the reason."""


@dataclass(frozen=True)
class HFModel:
    """Describes the model of a Hugging Face directory.

    Attributes:
        path: The directory.
        architecture: Architecture in ``config.json``, such as ``Qwen3ForCausalLM``.
        model_args: Torchtitan's arguments of the model.
        train_spec: Upstream's training spec of the model family.
        vocab_size: Number of rows of the embedding.
        eos_token_ids: Ids of the tokens that end a completion.
        max_position_embeddings: Length of the longest sequence that the model was trained for.
    """

    path: Path
    architecture: str
    model_args: BaseModelArgs
    train_spec: TrainSpec
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_position_embeddings: int


def read_hf_model(path: str | Path, *, setting: str = "model.hf_assets_path") -> HFModel:
    """Reads a Hugging Face directory.

    Args:
        path: The directory.
        setting: TOML key that names the directory, for error messages.

    Raises:
        ModelError: If ``path`` is not such a directory, its architecture is not supported, it
            uses a variant that upstream's model lacks, or it names no end-of-sequence token.
    """
    path = Path(path)
    config = _read_json(path / "config.json", setting)
    architecture = _architecture(config)
    if architecture not in _FAMILIES:
        raise ModelError(
            f"The architecture {architecture} of {setting} ({path}) is not supported. "
            f"Supported architectures: {', '.join(sorted(_FAMILIES))}."
        )
    family_spec, make_args = _FAMILIES[architecture]
    if wrong := wrong_size(config):
        raise ModelError(
            f"{setting} must be a model's directory with a sound config.json, but in "
            f"{path / 'config.json'} {wrong}. Download the model again, or correct the file."
        )
    _refuse_variants(config, path)
    return HFModel(
        path=path,
        architecture=architecture,
        model_args=make_args(config, path),
        train_spec=family_spec(),
        vocab_size=config["vocab_size"],
        eos_token_ids=_eos_token_ids(path, setting),
        max_position_embeddings=config.get("max_position_embeddings", 0),
    )


def _read_json(file: Path, setting: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{setting} must be a readable Hugging Face model directory; reading {file} failed: "
            f"{error}"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{setting} must be a readable Hugging Face model directory, but {file} holds a "
            f"{type(content).__name__} where an object must be. Download the model again."
        )
    return content


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) else "<none>"


def _refuse_variants(config: dict[str, Any], path: Path) -> None:
    wanted = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "use_sliding_window": (False, None),
    }
    for key, allowed in wanted.items():
        if config.get(key) not in allowed:
            raise ModelError(
                f"{key} = {config[key]!r} in {path / 'config.json'} is not supported: "
                f"torchtitan's model implements {key} = {allowed[0]!r} only."
            )


def _eos_token_ids(path: Path, setting: str) -> tuple[int, ...]:
    try:
        return eos_token_ids(path)
    except NoEosTokenError as error:
        raise ModelError(f"{setting}: {error}") from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{setting} must be a readable Hugging Face model directory; reading the "
            f"end-of-sequence token from {path} failed: {error}"
        ) from error


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Returns base frequency and scaling, from either of transformers' two spellings."""
    parameters = config.get("rope_parameters") or {}
    scaling = dict(config.get("rope_scaling") or parameters)
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    return float(theta), scaling


def _rope_type(scaling: dict[str, Any]) -> str:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _qwen3_args(config: dict[str, Any], path: Path) -> Qwen3ModelArgs:
    theta, scaling = _rope(config)
    if _rope_type(scaling) != "default":
        raise ModelError(
            f"rope type {_rope_type(scaling)!r} in {path / 'config.json'} is not supported "
            "for Qwen3. Remove the rope scaling to train at the model's original length."
        )
    num_heads = config["num_attention_heads"]
    return Qwen3ModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=num_heads,
        n_kv_heads=config.get("num_key_value_heads", num_heads),
        vocab_size=config["vocab_size"],
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        hidden_dim=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=theta,
        qk_norm=True,
        max_seq_len=config["max_position_embeddings"],
        attn_type="flex",
        enable_weight_tying=config.get("tie_word_embeddings", False),
    )


def _qwen3_moe_args(config: dict[str, Any], path: Path) -> Qwen3ModelArgs:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            f"{path / 'config.json'} mixes dense layers with sparse ones (mlp_only_layers, "
            "decoder_sparse_step), which is not supported."
        )
    args = _qwen3_args(config, path)
    args.moe_enabled = True
    args.moe_inter_dim = config["moe_intermediate_size"]
    args.moe_args = MoEArgs(
        # transformers 5 writes `num_local_experts`; version 4 wrote `num_experts`.
        num_experts=config.get("num_local_experts") or config["num_experts"],
        num_shared_experts=0,
        top_k=config["num_experts_per_tok"],
        score_func="softmax",
        route_norm=config.get("norm_topk_prob", False),
        score_before_experts=False,
        # A load-balancing bias would route differently from the server, which has none.
        load_balance_coeff=None,
    )
    return args


def _llama_args(config: dict[str, Any], path: Path) -> TransformerModelArgs:
    dim, num_heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("tie_word_embeddings", False):
        raise ModelError(
            f"tie_word_embeddings = true in {path / 'config.json'} is not supported for Llama: "
            "torchtitan's Llama has a separate output layer."
        )
    if config.get("head_dim") not in (None, dim // num_heads):
        raise ModelError(
            f"head_dim = {config['head_dim']} in {path / 'config.json'} must be hidden_size / "
            f"num_attention_heads = {dim // num_heads} for Llama."
        )
    theta, scaling = _rope(config)
    intermediate = config["intermediate_size"]
    return TransformerModelArgs(
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=num_heads,
        n_kv_heads=config.get("num_key_value_heads", num_heads),
        vocab_size=config["vocab_size"],
        # Upstream derives the width from `dim` and rounds it up to a multiple of `multiple_of`.
        # This multiplier gives at most half of the wanted width, so that rounding up to a
        # multiple of the wanted width yields exactly the wanted width.
        multiple_of=intermediate,
        ffn_dim_multiplier=intermediate / (8 * dim),
        norm_eps=config["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling_args=_llama_rope_scaling(scaling, path),
        max_seq_len=config["max_position_embeddings"],
        attn_type="flex",
    )


def _llama_rope_scaling(scaling: dict[str, Any], path: Path) -> RoPEScalingArgs:
    match _rope_type(scaling):
        case "default":
            # Upstream always scales; a factor of 1 leaves every frequency as it is.
            return RoPEScalingArgs(scaling_factor=1.0)
        case "llama3":
            return RoPEScalingArgs(
                scaling_factor=scaling["factor"],
                low_freq_factor=scaling["low_freq_factor"],
                high_freq_factor=scaling["high_freq_factor"],
                original_max_position_embeddings=scaling["original_max_position_embeddings"],
            )
        case other:
            raise ModelError(
                f"rope type {other!r} in {path / 'config.json'} is not supported for Llama. "
                "Supported rope types: default, llama3."
            )


_FAMILIES: dict[str, tuple[Callable[[], TrainSpec], Callable[[dict[str, Any], Path], Any]]] = {
    "LlamaForCausalLM": (llama3_train_spec, _llama_args),
    "Qwen3ForCausalLM": (qwen3_train_spec, _qwen3_args),
    "Qwen3MoeForCausalLM": (qwen3_train_spec, _qwen3_moe_args),
}
"""For each architecture, upstream's training spec and the function that reads its config."""
