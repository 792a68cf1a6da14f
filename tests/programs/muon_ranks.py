"""Trains two steps with Muon under several layouts, also from the checkpoint of another layout."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from build_model import build_stages
from safetensors.torch import load_file, save_file
from sharded_model import picked_sum, rows_of, runner_of, whole

from torchtitan.grpo.config.job_config import Optimizer
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.training.optimizers import build_optimizers


class Training:
    def __init__(self, arguments: dict, layout: dict) -> None:
        self.rows = rows_of(arguments)
        self.built, stages = build_stages(arguments["model"], arguments["seq_len"], **layout)
        self.runner = runner_of(self.built, stages)
        self.num_copies = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
        config = Optimizer(name="Muon", implementation="foreach", **arguments["optimizer"])
        self.optimizers = build_optimizers(self.built.parts, config)

    def step(self) -> None:
        self.optimizers.zero_grad()
        self.runner.forward_backward(self.rows, picked_sum(self.rows))
        for _, parameter in named_parameters(self.built.parts):
            assert parameter.grad is not None
            parameter.grad.mul_(1 / self.num_copies)
        self.optimizers.step()

    def state(self) -> dict:
        model = {n: p.detach() for n, p in named_parameters(self.built.parts)}
        return {"model": model, "optimizer": self.optimizers.state_dict()}

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.optimizers.load_state_dict(state["optimizer"])

    def whole(self) -> dict[str, torch.Tensor]:
        named = named_parameters(self.built.parts)
        return {n: whole(p.detach()).clone().contiguous() for n, p in named}


def write_reference(arguments: dict) -> dict:
    folder, training = Path(arguments["reference"]), Training(arguments, {})
    save_file(training.whole(), folder / "begin.safetensors")
    training.step()
    dcp.save(training.state(), checkpoint_id=str(folder / "checkpoint"))
    training.step()
    save_file(training.whole(), folder / "end.safetensors")
    kinds = [type(optimizer).__name__ for optimizer in training.optimizers]
    return {"kinds": kinds, "state": sorted(training.optimizers.state_dict())}


def distances(found: dict, begin: dict, end: dict) -> dict[str, float]:
    return {
        name: float((p - end[name]).norm() / (end[name] - begin[name]).norm())
        for name, p in found.items()
    }


def main(arguments):
    if not arguments["layouts"]:
        return write_reference(arguments)
    folder = Path(arguments["reference"])
    begin, end = load_file(folder / "begin.safetensors"), load_file(folder / "end.safetensors")
    results = {}
    for name, layout in arguments["layouts"].items():
        trained = Training(arguments, layout)
        trained.step()
        trained.step()
        resumed = Training(arguments, layout)
        resumed.load(str(folder / "checkpoint"))
        resumed.step()
        results[name] = {
            "trained": distances(trained.whole(), begin, end),
            "resumed": distances(resumed.whole(), begin, end),
        }
    return results
