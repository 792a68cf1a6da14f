# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The model families: one row for each architecture in ``config.json``.

All are decoders of pre-norm blocks with rotary attention and a gated feed-forward: upstream's
Qwen3 model with parts switched on or off. See `docs/how-to/extend.md`.
"""

from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.models.decoder import DecoderArgs, read_rotary
from torchtitan.grpo.upstream.models import MoEArgs

# Values that all families need. A key that config.json lacks is accepted.
_REFUSED_OTHERWISE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}


@dataclass(frozen=True)
class Family:
    qk_norm: bool = False
    qkv_bias: bool = False
    has_experts: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, has_experts=True),
}


def refusals(config: dict[str, Any]) -> list[str]:
    """Returns a sentence for each setting of a ``config.json`` that no family's model computes."""
    return [
        f"{key} = {config[key]!r} is not supported, only {key} = {allowed[0]!r} is."
        for key, allowed in _REFUSED_OTHERWISE.items()
        if key in config and config[key] not in allowed
    ]


def decoder_args(family: Family, config: dict[str, Any]) -> DecoderArgs:
    """Raises KeyError if a size is missing, ValueError if the rotary embedding is not supported."""
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    args = DecoderArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=num_heads,
        n_kv_heads=config.get("num_key_value_heads") or num_heads,
        vocab_size=config["vocab_size"],
        head_dim=head_dim,
        hidden_dim=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        rotary=read_rotary(config, head_dim),
        max_seq_len=config["max_position_embeddings"],
        attn_type="flex",
        enable_weight_tying=config.get("tie_word_embeddings", False),
    )
    if family.has_experts:
        _add_experts(args, config)
    return args


def _add_experts(args: DecoderArgs, config: dict[str, Any]) -> None:
    every = config.get("decoder_sparse_step", 1)
    listed = set(config.get("mlp_only_layers") or [])
    dense = [i for i in range(args.n_layers) if i in listed or (i + 1) % every]
    if len(dense) == args.n_layers:
        return  # no layer has experts
    args.dense_layers = tuple(dense)
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
