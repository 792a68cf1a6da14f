# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks ``[lora]``: that adapters fit the model and the other settings."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import require
from torchtitan.grpo.pipeline.stages import stage_modules
from torchtitan.grpo.weight_wire.adapter_names import TARGETS

if TYPE_CHECKING:
    from torchtitan.grpo.models.hf_config import HFModel


def check_lora(config: JobConfig) -> None:
    lora, grpo, checkpoint = config.lora, config.grpo, config.checkpoint
    if lora.rank == 0:
        return
    unknown = [name for name in lora.target_modules if name not in TARGETS]
    require(
        bool(lora.target_modules) and not unknown,
        f"lora.target_modules must name at least one of {', '.join(TARGETS)}, got "
        f"{unknown or lora.target_modules}. Name layers from this list.",
    )
    require(
        len(set(lora.target_modules)) == len(lora.target_modules),
        f"lora.target_modules must name each layer once, got {lora.target_modules}.",
    )
    require(
        grpo.ref_model_path is None and grpo.ref_model_ema == 0 and not grpo.ref_model_offload,
        "With lora.rank above 0 the reference is the base model in model.hf_assets_path, which is in "
        "memory already: grpo.ref_model_path, grpo.ref_model_ema and grpo.ref_model_offload must be "
        f"left at their defaults, got {grpo.ref_model_path!r}, {grpo.ref_model_ema:g} and "
        f"{grpo.ref_model_offload}. Remove them, or train all weights with lora.rank = 0.",
    )
    require(
        not checkpoint.last_save_in_hf,
        "checkpoint.last_save_in_hf must be false with lora.rank above 0: checkpoints hold adapters "
        "alone. The run exports a Hugging Face directory at its end in any case.",
    )
    require(
        not (checkpoint.initial_load_path and checkpoint.initial_load_model_only),
        "checkpoint.initial_load_path must be a whole checkpoint of a run with adapters "
        "(checkpoint.initial_load_model_only = false) with lora.rank above 0: the base model is read "
        "from model.hf_assets_path. Export the model and name the export there.",
    )
    sync = config.weight_sync
    for key, value, conflicts in (
        ("transport", sync.transport, sync.transport == "disk"),
        ("delta", sync.delta, sync.delta),
    ):
        require(
            lora.push == "merged" or not conflicts,
            f"lora.push = 'adapters' cannot be used with weight_sync.{key} = {value!r}: adapters "
            "travel whole, and over process groups. Set lora.push = 'merged', or change the other.",
        )


def model_lora_problems(config: JobConfig, model: "HFModel") -> Iterator[str]:
    lora, args = config.lora, model.model_args
    if lora.rank == 0:
        return
    heads, kv_heads = args.n_heads * args.head_dim, (args.n_kv_heads or 0) * args.head_dim
    sizes = {
        "q_proj": (args.dim, heads),
        "k_proj": (args.dim, kv_heads),
        "v_proj": (args.dim, kv_heads),
        "o_proj": (heads, args.dim),
        "gate_proj": (args.dim, args.hidden_dim),
        "up_proj": (args.dim, args.hidden_dim),
        "down_proj": (args.hidden_dim, args.dim),
    }
    for name in lora.target_modules:
        if lora.rank > min(sizes[name]):
            yield (
                f"lora.rank must be at most {min(sizes[name])} for {name}, whose weight has the sizes "
                f"{sizes[name][0]} and {sizes[name][1]} ({model.path}), got {lora.rank}: an adapter of a "
                "larger rank has more parameters than the weight. Lower it."
            )
            return
    dense = set(range(args.n_layers))
    if args.moe_enabled:
        dense = set(args.dense_layers)
    in_feed_forward = {name for name in lora.target_modules if TARGETS[name].startswith("feed_")}
    if in_feed_forward and not dense:
        yield (
            f"lora.target_modules must not name {', '.join(sorted(in_feed_forward))} for a model whose "
            f"every layer has experts ({model.path}): the experts of a layer are one tensor and not linear "
            "layers, and get no adapters. Name layers of attention."
        )
    has_attention = len(in_feed_forward) < len(lora.target_modules)
    if config.parallelism.pipeline_parallel_degree > 1:
        yield from _stage_problems(config, args.n_layers, dense, has_attention)


def _stage_problems(
    config: JobConfig, num_layers: int, dense: set[int], has_attention: bool
) -> Iterator[str]:
    try:
        stages = stage_modules(config.parallelism, num_layers)
    except ValueError:
        return  # the check of the layout tells it
    for number, modules in enumerate(stages):
        layers = {int(m.removeprefix("layers.")) for m in modules if m.startswith("layers.")}
        if not (layers if has_attention else layers & dense):
            yield (
                "Each pipeline stage must hold a layer with adapters if lora.rank is above 0, and "
                f"stage {number} has {', '.join(modules)} alone, so that it would have nothing to "
                "train. Change parallelism.module_fqns_per_model_part, or the number of stages."
            )
            return
