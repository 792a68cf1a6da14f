# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that a reference model is the policy's model with other weights.

The reference is built from the policy's model arguments. Its weights alone do not reveal its
rotary base or its epsilon, and a wrong value would show only as an implausible KL.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel, ModelError, read_hf_model

# No weight depends on the longest sequence. Upstream's base of the rotary embedding is not read, and
# its frequencies follow from base and scaling.
_IRRELEVANT = frozenset(
    {"max_seq_len", "rope_theta", "rotary.frequencies", "rotary.attention_factor"}
)
# Keys in `config.json` of those torchtitan arguments that have another name there.
_NAME_IN_CONFIG = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "enable_weight_tying": "tie_word_embeddings",
    "moe_inter_dim": "moe_intermediate_size",
    "moe_args.top_k": "num_experts_per_tok",
    "moe_args.num_experts": "num_experts",
    "moe_args.route_norm": "norm_topk_prob",
    "rotary.theta": "rope_theta",
    "rotary.scaling": "rope_scaling",
    "dense_layers": "mlp_only_layers",
}


def check_reference(config: JobConfig) -> None:
    """Refuses a reference that is not the policy's model with other weights.

    Both directories are read again, because building a model changes its arguments.

    Raises:
        ModelError: If ``grpo.ref_model_path`` is not a usable directory, or holds another
            model.
    """
    path = config.grpo.ref_model_path
    if path is None:
        return
    policy = read_hf_model(config.model.hf_assets_path)
    reference = read_hf_model(path, setting="grpo.ref_model_path")
    found = list(_differences(policy, reference))
    if found:
        raise ModelError(
            f"grpo.ref_model_path ({path}) must hold the model of model.hf_assets_path "
            f"({policy.path}) with other weights, but their config.json files differ: "
            f"{'; '.join(found)}. Choose a reference of the same architecture."
        )


def _differences(policy: HFModel, reference: HFModel) -> Iterator[str]:
    if policy.architecture != reference.architecture:
        # The arguments of two model families cannot be compared one by one.
        yield f"architecture {reference.architecture} instead of {policy.architecture}"
        return
    if policy.window != reference.window:
        yield f"sliding_window {reference.window} instead of {policy.window}"
    wanted, found = _arguments(policy.model_args), _arguments(reference.model_args)
    for name, value in wanted.items():
        if found[name] != value:
            yield f"{_NAME_IN_CONFIG.get(name, name)} {found[name]} instead of {value}"


def _arguments(model_args: Any, prefix: str = "") -> dict[str, Any]:
    """Returns every relevant argument by name; names of nested arguments have a dot."""
    found: dict[str, Any] = {}
    for field in fields(model_args):
        value = getattr(model_args, field.name)
        if is_dataclass(value):
            found |= _arguments(value, f"{prefix}{field.name}.")
        elif prefix + field.name not in _IRRELEVANT:
            found[prefix + field.name] = value
    return found
