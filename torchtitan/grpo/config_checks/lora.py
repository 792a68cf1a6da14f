# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks ``[lora]``: that adapters fit the model and the other settings."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import require
from torchtitan.grpo.pipeline.stages import stage_modules

if TYPE_CHECKING:
    from torchtitan.grpo.models.hf_config import HFModel


def check_lora(config: JobConfig) -> None:
    lora, grpo, checkpoint = config.lora, config.grpo, config.checkpoint
    if lora.rank == 0:
        return
    require(
        bool(lora.target_modules),
        "lora.target_modules must name at least one layer, such as q_proj, got none.",
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
    targets: dict[str, tuple[int, ...]] = {}
    holders: dict[str, set[int]] = {}
    for number, layer in enumerate(args.layers):
        for part in layer.parts:
            if part.is_target:
                targets[part.target] = part.shape
                holders.setdefault(part.target, set()).add(number)
    unknown = sorted(set(lora.target_modules) - targets.keys())
    if unknown:
        experts = ""
        if args.has_experts:
            experts = (
                " The experts of a layer are one tensor and not linear layers, and get no adapters."
            )
        yield (
            f"lora.target_modules must name layers of the model ({model.path}), which has "
            f"{', '.join(targets)}, got {', '.join(unknown)}.{experts}"
        )
        return
    for name in lora.target_modules:
        smallest, sizes = min(targets[name]), " and ".join(map(str, targets[name][::-1]))
        if lora.rank > smallest:
            yield (
                f"lora.rank must be at most {smallest} for {name}, whose weight has the sizes "
                f"{sizes} ({model.path}), got {lora.rank}: an adapter of a larger rank has more "
                "parameters than the weight. Lower it."
            )
            return
    if config.parallelism.pipeline_parallel_degree > 1:
        adapted = set[int]().union(*(holders[name] for name in lora.target_modules))
        yield from _stage_problems(config, args.n_layers, adapted)


def _stage_problems(config: JobConfig, num_layers: int, adapted: set[int]) -> Iterator[str]:
    try:
        stages = stage_modules(config.parallelism, num_layers)
    except ValueError:
        return  # the check of the layout tells it
    for number, modules in enumerate(stages):
        layers = {int(m.removeprefix("layers.")) for m in modules if m.startswith("layers.")}
        if not layers & adapted:
            yield (
                "Each pipeline stage must hold a layer with adapters if lora.rank is above 0, and "
                f"stage {number} has {', '.join(modules)} alone, so that it would have nothing to "
                "train. Change parallelism.module_fqns_per_model_part, or the number of stages."
            )
            return
