"""Logprobs with and without adapters, and gradients of adapters, under several layouts."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from build_model import Built, build_stages
from safetensors.torch import load_file
from sharded_model import rows_of
from torch.distributed.tensor import DTensor

from torchtitan.grpo.models.hf_weights import full_hf_tensors, named_parameters
from torchtitan.grpo.models.lora import adapters_of, begin_adapters
from torchtitan.grpo.models.peft_format import export_peft, peft_name
from torchtitan.grpo.models.shards import local_block, local_tensor
from torchtitan.grpo.pipeline.deferred_stage import DeferredStage
from torchtitan.grpo.pipeline.schedule_builder import build_schedule
from torchtitan.grpo.training.base_reference import base_reference
from torchtitan.grpo.training.gradient_norm import GradientClipper
from torchtitan.grpo.training.runner import WholeModelRunner
from torchtitan.grpo.training.stage_runner import PipelineRunner, StageLoss


def load_adapters(built: Built, tensors: dict[str, torch.Tensor]) -> None:
    for name, parameter in adapters_of(built.parts).items():
        local = local_tensor(parameter)
        if local.numel():
            local.copy_(local_block(parameter).of(tensors[peft_name(built.adapter, name)]))


def gradient_errors(
    built: Built, expected: dict[str, torch.Tensor], num_copies: int
) -> dict[str, float]:
    """The relative error of the gradient of each adapter; frozen weights must have none."""
    errors = {}
    for name, parameter in named_parameters(built.parts):
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        grad = parameter.grad
        assert grad is not None, name
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        right = expected[peft_name(built.adapter, name)]
        errors[name] = float((full / num_copies - right).norm() / right.norm())
    return errors


def run(arguments: dict[str, Any], name: str, layout: dict[str, Any]) -> dict[str, Any]:
    rows, layout = rows_of(arguments), dict(layout)
    lora = arguments["lora"] | {"base_dtype": layout.pop("base_dtype", "training")}
    built, stages = build_stages(arguments["model"], arguments["seq_len"], lora=lora, **layout)
    frozen = {str(p.dtype) for _, p in named_parameters(built.parts) if not p.requires_grad}
    trained = {str(p.dtype) for _, p in named_parameters(built.parts) if p.requires_grad}
    begin_adapters(built.parts, seed=7)
    begun = {
        key: (p.full_tensor() if isinstance(p, DTensor) else p).double().norm().item()
        for key, p in adapters_of(built.parts).items()
    }
    load_adapters(built, load_file(arguments["adapters"]))
    if stages:
        loss = StageLoss()
        runner = PipelineRunner(build_schedule(built.config, stages, loss), loss, built.config)
    else:
        runner = WholeModelRunner(built.parts[0], rows_at_once=2)
    reference = base_reference(runner, built.parts, built.config)
    base, logprobs = reference.forward(rows), runner.forward(rows)
    runner.forward_backward(
        rows, lambda output, part: (output[..., 0] * rows.select(part).loss_mask).sum()
    )
    norm = GradientClipper(built.parts, built.dims, 1e9).clip()
    num_copies = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    merged = dict(full_hf_tensors(built.parts, built.adapter, torch.float32))
    folder = Path(arguments["folder"]) / name
    export_peft(
        built.parts, built.adapter, built.config.lora, arguments["model"], folder,
        torch.float32, is_writer=dist.get_rank() == 0,
    )  # fmt: skip
    expected = load_file(arguments["merged"]) if merged else {}
    return {
        "base": None if base is None else base[..., 0][rows.loss_mask].tolist(),
        "logprobs": None if logprobs is None else logprobs[..., 0][rows.loss_mask].tolist(),
        "gradient_errors": gradient_errors(built, load_file(arguments["gradients"]), num_copies),
        "norm": float(norm) / num_copies,
        "begun": begun,
        "dtypes": [sorted(frozen), sorted(trained)],
        "merge_error": max(
            (float((merged[key] - right).abs().max()) for key, right in expected.items()),
            default=0.0,
        ),
        "num_deferred": sum(
            stage.store.peak_bytes for stage in stages if isinstance(stage, DeferredStage)
        ),
    }


def main(arguments):
    return {name: run(arguments, name, layout) for name, layout in arguments["layouts"].items()}
