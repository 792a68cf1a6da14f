# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the ranks of `layout_parity.py`: trains on recorded batches under several layouts.

    torchrun --nproc_per_node=N benchmarks/layout_run.py JOBS.json

The model, runner, loss, clipping and replay are the trainer's own. Only the SGD optimizer is added,
because torchtitan does not offer it.
"""

# ruff: noqa: E402  (the device is settled before torchtitan's modules read it)

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.grpo.system.device import settle_device

settle_device()

import torch
import torch.distributed as dist

from torchtitan.grpo.config_checks import check_model
from torchtitan.grpo.config_manager import load_config
from torchtitan.grpo.entry import leave
from torchtitan.grpo.losses.objective import batch_loss_metrics
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.observe.console import init_console
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.upstream.trainer import OptimizersContainer
from torchtitan.grpo.upstream.trainer import train_spec as train_specs
from torchtitan.grpo_train import GRPOTrainer

SGD_LEARNING_RATE = 0.05


class WatchedTrainer(GRPOTrainer):
    """Trains on the recorded file, and keeps the values by which layouts are compared."""

    def __init__(self, *args: Any, use_sgd: bool) -> None:
        super().__init__(*args)
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.spread = 0.0
        self.use_sgd = use_sgd
        if use_sgd:
            self.optimizers = OptimizersContainer(
                self.model_parts, torch.optim.SGD, {"lr": SGD_LEARNING_RATE}
            )
            self.learner = replace(self.learner, optimizers=self.optimizers)
            if (critic := self.learner.critic) is not None:
                critic.optimizers = OptimizersContainer(
                    critic.parts, torch.optim.SGD, {"lr": SGD_LEARNING_RATE}
                )
        step, self.optimizers.step = self.optimizers.step, self._watched_step
        self._optimizer_step = step

    def _watched_step(self) -> None:
        if self.use_sgd and not self.gradients:
            gradients = {}
            for name, parameter in self._trained():
                assert parameter.grad is not None, name
                gradients[name] = whole(parameter.grad)
            self.gradients, self.spread = merged(gradients)
        self._optimizer_step()

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from named_parameters(self.model_parts)
        if self.learner.critic is not None:
            for name, parameter in named_parameters(self.learner.critic.parts):
                yield f"critic.{name}", parameter

    def _log_step(self, learned, learning_rate) -> None:
        super()._log_step(learned, learning_rate)
        # These metrics have been reduced over all ranks.
        metrics = batch_loss_metrics(learned.totals, len(learned.grad_norms))
        self.losses.append(metrics["loss/total"])
        self.grad_norms.append(sum(learned.grad_norms) / len(learned.grad_norms))

    def _finish(self) -> None:
        """Does nothing: no model is exported."""

    def result(self) -> dict[str, Any]:
        named = {name: whole(parameter.detach()) for name, parameter in self._trained()}
        parameters, spread = merged(named)
        return {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "gradients": self.gradients,
            "parameters": parameters,
            "spread": max(spread, self.spread),
        }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()  # pyright: ignore


def merged(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], float]:
    """Returns the tensors of all ranks, and the largest relative difference of their copies.

    Pipeline stages hold different tensors. Replicas and tensor-parallel ranks hold copies of the
    same tensors, which stay equal only because the ranks compute the same.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensors)
    everything: dict[str, torch.Tensor] = {}
    spread = 0.0
    for part in gathered:
        for name, tensor in part.items():
            first = everything.setdefault(name, tensor).double()
            distance = (tensor.double() - first).norm() / first.norm()
            spread = max(spread, distance.nan_to_num(float("inf")).item())
    return everything, spread


def run_job(job: dict[str, Any]) -> None:
    config = load_config([*job["args"]])
    hf_model = read_hf_model(config.model.hf_assets_path)
    check_model(config, hf_model)
    # Upstream registers a model once per process, but this process runs several trainers.
    train_specs._extra_train_specs.clear()
    # Each trainer compiles its model again, as the first trainer of a process does.
    torch.compiler.reset()
    result = {}
    for optimizer in ("sgd", "adamw"):
        train_specs._extra_train_specs.clear()
        channel = RankChannel(60.0, lambda lost: None)
        trainer = WatchedTrainer(
            config, hf_model, StopRequest(60.0), channel, use_sgd=optimizer == "sgd"
        )
        try:
            trainer.train()
            result[optimizer] = trainer.result()
        finally:
            trainer.close()
            channel.close()
    if dist.get_rank() == 0:
        torch.save(result, job["out"])


def main() -> int:
    init_console("warning", is_rank_zero=False)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run_job(job)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main)
