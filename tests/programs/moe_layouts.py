"""Logprobs and gradients of a mixture of experts under several layouts."""

import numpy as np
import torch
from build_model import Built, build
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from torchtitan.grpo.data.rows import Sample, build_rows
from torchtitan.grpo.models.hf_weights import named_parameters
from torchtitan.grpo.training.runner import WholeModelRunner


def gradient_errors(
    built: Built, expected: dict[str, torch.Tensor], num_copies: int
) -> dict[str, float]:
    """Returns the relative error of the gradient of each parameter."""
    errors = {}
    for name, parameter in named_parameters(built.parts):
        grad = parameter.grad
        assert grad is not None, name
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found = built.adapter.to_hf({name: full / num_copies})
        distance = torch.stack([(found[key] - expected[key]).norm() for key in found]).norm()
        errors[name] = float(distance / torch.stack([expected[k].norm() for k in found]).norm())
    return errors


def main(arguments):
    samples = [
        Sample(np.array(ids[:2], np.int32), np.array(ids[2:], np.int32), np.zeros(len(ids) - 2))
        for ids in arguments["sequences"]
    ]
    rows = build_rows(samples, arguments["rows"], arguments["seq_len"])
    expected = load_file(arguments["gradients"])
    results = {}
    for name, layout in arguments["layouts"].items():
        built = build(arguments["model"], arguments["seq_len"], **layout)
        runner = WholeModelRunner(built.parts[0], rows_at_once=2)
        logprobs = runner.forward(rows)[..., 0]
        runner.forward_backward(
            rows, lambda output, part: (output[..., 0] * rows.select(part).loss_mask).sum()
        )
        # Every data-parallel rank had all rows, and gradients are summed.
        num_copies = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
        results[name] = {
            "logprobs": logprobs[rows.loss_mask].tolist(),
            "gradient_errors": gradient_errors(built, expected, num_copies),
        }
    return results
