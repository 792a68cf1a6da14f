# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""torchtitan's own Qwen3, whose step is counted beside ours. Nothing else imports torchtitan's models."""

from typing import Any

from torchtitan.config import JobConfig as TitanConfig
from torchtitan.models.qwen3 import get_train_spec
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.train import Trainer

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel

__all__ = ["Trainer", "titan_config", "titan_model"]


def titan_config(config: JobConfig) -> TitanConfig:
    """Returns torchtitan's own configuration, with our values of the settings that both have."""
    titan = TitanConfig()
    for name, theirs in vars(titan).items():
        ours = vars(getattr(config, name, theirs))
        for setting in vars(theirs).keys() & ours.keys():
            setattr(theirs, setting, ours[setting])
    return titan


def titan_model(hf_model: HFModel) -> tuple[TrainSpec, Any]:
    """Returns torchtitan's description of its dense model, and the arguments of this size."""
    args = hf_model.model_args
    (layer,) = args.layers.kinds
    row = layer.attention
    return get_train_spec(), Qwen3ModelArgs(
        dim=args.dim,
        n_layers=args.n_layers,
        n_heads=row.num_heads,
        n_kv_heads=row.num_kv_heads,
        head_dim=row.head_dim,
        hidden_dim=layer.feed_forward.hidden,  # pyright: ignore[reportAttributeAccessIssue]
        vocab_size=args.vocab_size,
        norm_eps=args.norm_eps,
        rope_theta=args.rotary.theta,
        qk_norm=row.has_qk_norm,
        max_seq_len=args.max_seq_len,
        enable_weight_tying=args.enable_weight_tying,
        attn_type="flex",
        attn_mask_type="block_causal",  # it keeps sequences apart as well
    )
