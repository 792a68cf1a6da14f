"""Logprobs, gradients and the gradient norm of a model under several layouts."""

import torch
import torch.distributed as dist
from build_model import Built, build_stages
from safetensors.torch import load_file
from sharded_model import picked_sum, rows_of, runner_of, whole

from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.training.gradient_norm import GradientClipper


def gradient_errors(
    built: Built, expected: dict[str, torch.Tensor], num_copies: int
) -> dict[str, float]:
    errors = {}
    for name, parameter in named_parameters(built.parts):
        grad = parameter.grad
        assert grad is not None, name
        found = built.adapter.to_hf({name: whole(grad) / num_copies})
        distance = torch.stack([(found[key] - expected[key]).norm() for key in found]).norm()
        error = float(distance / torch.stack([expected[k].norm() for k in found]).norm())
        errors[name] = max(error, errors.get(name, 0.0))
    return errors


def largest_gradient(built: Built, expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    names = {
        name: built.adapter.to_hf({name: torch.empty(parameter.shape, device="meta")})
        for name, parameter in named_parameters(built.parts)
    }
    return max(
        (float(torch.stack([expected[key].norm() for key in keys]).norm()), name)
        for name, keys in names.items()
    )


def main(arguments):
    rows = rows_of(arguments)
    expected = load_file(arguments["gradients"])
    results = {}
    for name, layout in arguments["layouts"].items():
        built, stages = build_stages(arguments["model"], arguments["seq_len"], **layout)
        runner = runner_of(built, stages)
        logprobs = runner.forward(rows)
        runner.forward_backward(rows, picked_sum(rows))
        clipper, group = GradientClipper(built.parts, built.dims, 1e9), dist.group.WORLD
        assert group is not None
        norm = clipper.clip()
        # Every data-parallel rank had all rows, and gradients are summed.
        num_copies = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
        results[name] = {
            "logprobs": None if logprobs is None else logprobs[..., 0][rows.loss_mask].tolist(),
            "gradient_errors": gradient_errors(built, expected, num_copies),
            "norm": float(norm) / num_copies,
            "largest": clipper.largest(float(norm), group),
            "largest held": largest_gradient(built, expected),
        }
        clipping = GradientClipper(built.parts, built.dims, float(norm) / 2)
        # Not with `clip`, which would add up gradients that are tied once more.
        for parameter in clipping.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        results[name]["largest of clipped"] = clipping.largest(float(norm), group)
    return results
