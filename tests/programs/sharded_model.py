"""Loads a Hugging Face directory into a sharded model, scores it, and computes gradients."""

import torch
from build_model import build

from torchtitan.grpo.data.rows import Sample, TrainRows, build_rows
from torchtitan.grpo.training.runner import WholeModelRunner
from torchtitan.grpo.upstream.parallelism import dist_utils


def rows_of(arguments: dict) -> TrainRows:
    """Returns the given sequences in the given rows, with prompts of two tokens."""
    samples = [
        Sample(
            torch.tensor(ids[:2], dtype=torch.int32).numpy(),
            torch.tensor(ids[2:], dtype=torch.int32).numpy(),
            torch.zeros(len(ids) - 2).numpy(),
        )
        for ids in arguments["sequences"]
    ]
    return build_rows(samples, arguments["rows"], arguments["seq_len"])


def main(arguments):
    built = build(arguments["model"], arguments["seq_len"], **arguments["layout"])
    rows = rows_of(arguments)
    runner = WholeModelRunner(built.parts[0], rows_at_once=2)
    operands = set()
    built.parts[0].output.register_forward_pre_hook(
        lambda head, inputs: operands.update((str(inputs[0].dtype), str(head.weight.dtype)))
    )
    logprobs = runner.forward(rows)[..., 0]
    runner.forward_backward(
        rows, lambda output, part: (output[..., 0] * rows.select(part).loss_mask).sum()
    )
    grad_norm = dist_utils.clip_grad_norm_(built.parts[0].parameters(), 1e9, foreach=True)
    return {
        "logprobs": logprobs.tolist(),
        "mask": rows.loss_mask.tolist(),
        "grad_norm": float(grad_norm),
        "operands": sorted(operands),
    }
