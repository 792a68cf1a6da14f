# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How a rank builds the model of a Hugging Face directory, alone or beside another, and checks its weights."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.losses.policy_terms import BUILTIN
from torchtitan.grpo.models.attention_choice import choose_packed_attention, try_packed_attention
from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.models.embedding_rows import embedding_notes
from torchtitan.grpo.models.hf_config import HFModel, check_reference
from torchtitan.grpo.models.hf_names import DecoderAdapter, StateDictAdapter, ValueAdapter
from torchtitan.grpo.models.hf_weights import check_hf_weights, load_hf_weights
from torchtitan.grpo.models.lora import add_adapters
from torchtitan.grpo.models.packed_model import PackedModel, ScoringSettings
from torchtitan.grpo.models.parallelize import parallelize
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.pipeline.stages import ends_one_at_a_time
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.training.frame import ModelSpec, Trainer
from torchtitan.grpo.training.reference import Reference
from torchtitan.grpo.training.runner import ModelRunner, WholeModelRunner
from torchtitan.grpo.upstream.parallelism import ParallelDims, utils

if TYPE_CHECKING:
    from torchtitan.grpo.pipeline.lean_stage import LeanStage
    from torchtitan.grpo.training.stage_runner import StageLoss


def hf_train_spec(
    model: HFModel, config: JobConfig, schedule_steps: int | None = None
) -> ModelSpec:
    settings = scoring_settings(config, model.model_args.head_dim)
    return ModelSpec(
        model_args=model.model_args,
        model_cls=partial(PackedModel, settings=settings),
        state_dict_adapter=DecoderAdapter,
        parallelize_fn=parallelize,
        pipelining_fn=_pipeline,
        schedule_steps=schedule_steps,
    )


def scoring_settings(config: JobConfig, head_dim: int | None = None) -> ScoringSettings:
    """Returns the settings of token scoring; ``head_dim`` is None if every kernel supports the heads."""
    grpo = config.grpo
    return ScoringSettings(
        attention=choose_packed_attention(config, utils.device_type, head_dim),
        compiled=config.compile.enable,
        temperature=config.rollout.temperature,
        chunk_tokens=grpo.logprob_chunk_tokens,
        with_entropy=True,
        # A loss of the user's may use the entropy, and a built-in one does not.
        trains_entropy=grpo.entropy_coef > 0 or grpo.policy_loss not in BUILTIN,
        keep_logits=grpo.logprob_keep_logits and ends_one_at_a_time(config.parallelism),
        shares_contexts=config.prompts.share_contexts,
    )


def tried_train_spec(
    model: HFModel, config: JobConfig, device: torch.device, schedule_steps: int | None = None
) -> ModelSpec:
    """Tries the model's attention on the device, and then returns the model's spec."""
    try_packed_attention(config, device, model.model_args.head_dim)
    return hf_train_spec(model, config, schedule_steps)


def _pipeline(
    model: nn.Module,
    dims: ParallelDims,
    config: JobConfig,
    device: torch.device,
) -> "tuple[Any, StageLoss, list[nn.Module]]":
    from torchtitan.grpo.pipeline.auto import resolve_schedule
    from torchtitan.grpo.pipeline.build import build_schedule, split_model
    from torchtitan.grpo.training.stage_runner import StageLoss

    measured = resolve_schedule(model, dims, config, device)
    stages, parts = split_model(model, dims, config, device)
    loss = StageLoss()
    return build_schedule(config, stages, loss, measured), loss, parts


def build_policy_runner(trainer: Trainer) -> ModelRunner:
    config, schedule = trainer.job_config, trainer.pp_schedule
    if schedule is not None:
        from torchtitan.grpo.pipeline.fill_jobs import load_jobs
        from torchtitan.grpo.training.stage_runner import PipelineRunner

        runner = PipelineRunner(schedule, trainer.stage_loss, config)
        if paths := config.parallelism.pipeline_fill_jobs:
            runner.fill(load_jobs(paths, schedule.stages[0], config.job.dump_folder))
        return runner
    return whole_model_runner(trainer.model_parts[0], config)


def whole_model_runner(model: nn.Module, config: JobConfig) -> WholeModelRunner:
    kept: Any = config.parallelism.fsdp_between_microbatches
    return WholeModelRunner(model, config.training.local_batch_size, kept)


def build_reference(trainer: Trainer) -> Reference:
    """Builds the reference in the policy's layout, from ``grpo.ref_model_path`` if that is set.

    Raises ModelError if the directory holds another model, or unreadable weights.
    """
    config: Any = trainer.job_config
    settings = config.grpo
    check_reference(config)
    spec = trainer.train_spec
    stages, parts = build_beside(trainer, lambda: spec.model_cls(trainer.model_args))
    for part in parts:
        part.eval().requires_grad_(False)
    path = settings.ref_model_path or config.model.hf_assets_path
    key = "grpo.ref_model_path" if settings.ref_model_path else "model.hf_assets_path"
    adapter = spec.state_dict_adapter(trainer.model_args, path)
    load_hf_weights(parts, adapter, path, setting=key)
    if stages:
        from torchtitan.grpo.training.stage_runner import PipelineForwardRunner

        runner = PipelineForwardRunner(stages, config)
    else:
        runner = whole_model_runner(parts[0], config)
    ema, offload = settings.ref_model_ema, settings.ref_model_offload
    return Reference(runner, parts, trainer.device, ema=ema, offload=offload)


def build_beside(
    trainer: Trainer, make: Callable[[], nn.Module], *, is_second: bool = False
) -> "tuple[list[LeanStage], list[nn.Module]]":
    """Builds a second model in the policy's layout, with random weights.

    Returns its pipeline stages, if any, and its parts. ``is_second`` is passed to :func:`split_model`.
    """
    config: Any = trainer.job_config
    dims = trainer.parallel_dims
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        whole = make()
    stages: list[LeanStage] = []
    if dims.pp_enabled:
        from torchtitan.grpo.pipeline.build import split_model

        stages, parts = split_model(whole, dims, config, trainer.device, is_second=is_second)
    else:
        parts = [parallelize(whole, dims, config)]
    for part in parts:
        part.to_empty(device=trainer.device)
        with torch.no_grad():
            part.init_weights()  # pyright: ignore[reportCallIssue]  (rotary tables)
    return stages, parts


def check_weights(
    config: JobConfig, model: HFModel, *, is_trained: bool = True
) -> tuple[int, list[str]]:
    """Checks, without loading, that the files of model, reference and critic hold the weights needed.

    Returns the model's number of tensors, and warnings about unread tensors and empty embedding rows.
    Raises ModelError if a tensor is missing, ambiguous, quantized or of another shape, or if a tied
    model's output layer differs from its embedding.
    """
    built, adapter_of = build_without_memory(config, copy.deepcopy(model))
    reference, notes = config.grpo.ref_model_path, []
    if config.grpo.kl_coef > 0 and reference is not None:
        adapter = adapter_of(reference)
        _, notes = check_hf_weights(built, adapter, Path(reference), setting="grpo.ref_model_path")
    if config.has_critic and config.critic.path is not None:
        notes += check_critic_weights(config, copy.deepcopy(model), config.critic.path)
    adapter = adapter_of(str(model.path))
    number, own = check_hf_weights(built, adapter, model.path, setting="model.hf_assets_path")
    if is_trained and not config.lora.rank:  # which leaves the embedding as it is
        own += embedding_notes(model, "model.hf_assets_path")
    return number, own + notes


def check_critic_weights(config: JobConfig, model: HFModel, path: str) -> list[str]:
    model.model_args.update_from_config(config)
    args = critic_args(model.model_args)
    with torch.device("meta"):
        built = PackedModel(args, critic_settings(config, args))
    adapter = ValueAdapter(args, path)
    return check_hf_weights(built, adapter, Path(path), setting="critic.path", new=VALUE_HEAD)[1]


VALUE_HEAD = ("output.weight",)
"""The parameters of a critic that a directory may lack."""


def critic_args(model_args: Any) -> DecoderArgs:
    """Returns the policy's model arguments, adapted to a critic, whose output layer is never tied."""
    return replace(model_args, enable_weight_tying=False)


def critic_settings(config: JobConfig, args: DecoderArgs) -> ScoringSettings:
    return replace(scoring_settings(config, args.head_dim), head="values")


def parameter_shapes(config: JobConfig, model: HFModel) -> dict[str, tuple[int, ...]]:
    built, _ = build_without_memory(config, copy.deepcopy(model))
    if config.lora.rank:
        add_adapters(built, config.lora, torch.float32)
    return {name: tuple(p.shape) for name, p in named_parameters([built])}


def build_without_memory(
    config: JobConfig, model: HFModel
) -> tuple[nn.Module, Callable[[str], StateDictAdapter]]:
    """Returns ``model`` built on the meta device, and a function that makes its adapter for a path.

    Changes the arguments of ``model``.
    """
    spec = hf_train_spec(model, config, config.training.steps)
    args: Any = model.model_args
    args.update_from_config(config)
    with torch.device("meta"):
        built = spec.model_cls(args)
    return built, lambda path: spec.state_dict_adapter(args, path)
