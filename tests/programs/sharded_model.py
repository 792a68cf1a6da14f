"""Loads a Hugging Face directory into sharded models and scores it."""

from collections.abc import Callable
from typing import Any

import torch
from build_model import Built, build
from torch.distributed.tensor import DTensor

from torchtitan.grpo.data.rows import Sample, TrainRows, build_rows
from torchtitan.grpo.data.shared_context import NO_GROUP
from torchtitan.grpo.pipeline.build import build_schedule
from torchtitan.grpo.training.runner import WholeModelRunner
from torchtitan.grpo.training.stage_runner import PipelineRunner, StageLoss


def rows_of(arguments: dict) -> TrainRows:
    """Rows of ``sequences``, of which ``prompts`` tokens (2) are the prompt; those of equal ``sharing`` share theirs."""
    sequences = arguments["sequences"]
    prompts = arguments.get("prompts", [2] * len(sequences))
    groups = arguments.get("sharing", [NO_GROUP] * len(sequences))
    samples = [
        Sample(
            torch.tensor(ids[:num_prompt], dtype=torch.int32).numpy(),
            torch.tensor(ids[num_prompt:], dtype=torch.int32).numpy(),
            torch.zeros(len(ids) - num_prompt).numpy(),
            group=group,
        )
        for ids, num_prompt, group in zip(sequences, prompts, groups, strict=True)
    ]
    return build_rows(samples, arguments["rows"], arguments["seq_len"])


def runner_of(built: Built, stages: list[Any], rows_at_once: int = 2) -> Any:
    if not stages:
        return WholeModelRunner(built.parts[0], rows_at_once=rows_at_once)
    loss = StageLoss()
    return PipelineRunner(build_schedule(built.config, stages, loss), loss, built.config)


def picked_sum(rows: TrainRows) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """A loss: the sum of the logprobs of all trained tokens."""
    return lambda output, part: (output[..., 0] * rows.select(part).loss_mask).sum()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(arguments):
    return [scored(arguments, layout) for layout in arguments["layouts"]]


def scored(arguments: dict, layout: dict) -> dict:
    built = build(arguments["model"], arguments["seq_len"], **layout)
    operands = set()
    built.parts[0].output.register_forward_pre_hook(
        lambda head, inputs: operands.update((str(inputs[0].dtype), str(head.weight.dtype)))
    )
    logprobs = WholeModelRunner(built.parts[0], rows_at_once=2).forward(rows_of(arguments))
    return {"logprobs": logprobs[..., 0].tolist(), "operands": sorted(operands)}
