"""Logprobs with and without adapters, and gradients of adapters, under several layouts."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from build_model import Built, build_stages
from safetensors.torch import load_file
from sharded_model import picked_sum, rows_of, runner_of, whole

from torchtitan.grpo.models.hf_weights import full_hf_tensors
from torchtitan.grpo.models.lora import adapters_of, begin_adapters, export_peft, peft_name
from torchtitan.grpo.models.shards import local_block, local_tensor, named_parameters
from torchtitan.grpo.pipeline.lean_stage import DeferredStage
from torchtitan.grpo.training.gradient_norm import GradientClipper
from torchtitan.grpo.training.reference import base_reference
from torchtitan.grpo.training.runner import ForwardJob


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
        right = expected[peft_name(built.adapter, name)]
        errors[name] = float((whole(grad) / num_copies - right).norm() / right.norm())
    return errors


def num_copies_of(layout: dict[str, Any]) -> int:
    """Every data-parallel rank had all rows, and gradients are summed."""
    return layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)


def base_in_gaps(
    built: Built, runner: Any, reference: Any, arguments: dict[str, Any]
) -> dict[str, Any]:
    """The base's logprobs, of rows that wait for gaps, and what that pass did to gradients.

    Each sequence occurs twice, in a row of its own: few microbatches leave no gap.
    """
    numbers = [[i] for i in range(len(arguments["sequences"]))]
    rows = rows_of(arguments | {"rows": numbers * 2})
    before = [p.grad for p in adapters_of(built.parts).values()]
    for parameter in adapters_of(built.parts).values():
        parameter.grad = None
    job = ForwardJob(reference, rows)
    runner.forward_backward(rows, picked_sum(rows), [job])
    num_rows = rows.num_rows - (0 if job.is_done else job.waiting.num_rows)
    logprobs = job.logprobs()
    after = [p.grad for p in adapters_of(built.parts).values()]
    pairs = [(local_tensor(a), local_tensor(b)) for a, b in zip(before, after, strict=True)]
    return {
        "num_rows": num_rows,
        "logprobs": None if logprobs is None else logprobs[rows.loss_mask].tolist(),
        "gradient_error": max(
            float((2 * a - b).norm() / (2 * a).norm().clip(1e-9)) for a, b in pairs
        ),
    }


def run(arguments: dict[str, Any], name: str, layout: dict[str, Any]) -> dict[str, Any]:
    rows, layout = rows_of(arguments), dict(layout)
    lora = arguments["lora"] | {"base_dtype": layout.pop("base_dtype", "training")}
    built, stages = build_stages(arguments["model"], arguments["seq_len"], lora=lora, **layout)
    frozen = {str(p.dtype) for _, p in named_parameters(built.parts) if not p.requires_grad}
    trained = {str(p.dtype) for _, p in named_parameters(built.parts) if p.requires_grad}
    begin_adapters(built.parts, seed=7)
    begun = {key: whole(p).double().norm().item() for key, p in adapters_of(built.parts).items()}
    load_adapters(built, load_file(arguments["adapters"]))
    runner = runner_of(built, stages)
    reference = base_reference(runner, built.parts, built.config)
    base, logprobs = reference.forward(rows), runner.forward(rows)
    runner.forward_backward(rows, picked_sum(rows))
    norm = GradientClipper(built.parts, built.dims, 1e9).clip()
    errors = gradient_errors(built, load_file(arguments["gradients"]), num_copies_of(layout))
    in_gaps = base_in_gaps(built, runner, reference, arguments) if stages else None
    num_copies = num_copies_of(layout)
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
        "gradient_errors": errors,
        "in_gaps": in_gaps,
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
