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
from torchtitan.grpo.config_checks.load import load_config
from torchtitan.grpo.losses.objective import batch_loss_metrics
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.models.hf_weights import full_hf_tensors
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.observe.console import init_console
from torchtitan.grpo.start.entry import leave
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.system.stop import StopRequest
from torchtitan.grpo.upstream.trainer import OptimizersContainer
from torchtitan.grpo.upstream.trainer import train_spec as train_specs
from torchtitan.grpo_train import GRPOTrainer

SGD_FACTOR = 50  # the learning rate of SGD, relative to that of AdamW


class WatchedTrainer(GRPOTrainer):
    """Trains on the recorded file, and keeps the values by which layouts are compared."""

    def __init__(self, *args: Any, use_sgd: bool) -> None:
        super().__init__(*args)
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.gradients: dict[str, torch.Tensor] | None = None
        self.spread = 0.0
        self.use_sgd = use_sgd
        if use_sgd:
            sgd = {"lr": SGD_FACTOR * self.config.optimizer.lr}
            self.optimizers = OptimizersContainer(self.model_parts, torch.optim.SGD, sgd)
            self.learner = replace(self.learner, optimizers=self.optimizers)
            if (critic := self.learner.critic) is not None:
                own = OptimizersContainer(critic.parts, torch.optim.SGD, sgd)
                scorer = replace(self.learner.scorer, critic=replace(critic, optimizers=own))
                self.learner = replace(self.learner, scorer=scorer)
        step, self.optimizers.step = self.optimizers.step, self._watched_step
        self._optimizer_step = step

    def _watched_step(self) -> None:
        if self.use_sgd and self.gradients is None:
            gradients = {}
            for name, parameter in self._trained():
                assert parameter.grad is not None, name
                gradients[name] = parameter.grad
            self.gradients, self.spread = merged(gradients)
        self._optimizer_step()

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        critic = [] if self.learner.critic is None else self.learner.critic.parts
        for prefix, parts in (("", self.model_parts), ("critic.", critic)):
            for name, parameter in named_parameters(parts):
                if parameter.requires_grad:
                    yield prefix + name, parameter

    def _log_step(self, learned, learning_rate) -> None:
        super()._log_step(learned, learning_rate)
        # These metrics have been reduced over all ranks.
        metrics = batch_loss_metrics(learned.totals, len(learned.grad_norms))
        self.losses.append(metrics["loss/total"])
        self.grad_norms.append(sum(learned.grad_norms) / len(learned.grad_norms))

    def _finish(self) -> None:
        """Does nothing: no model is exported."""

    def result(self) -> dict[str, Any]:
        parameters, spread = merged({name: p.detach() for name, p in self._trained()})
        values = {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "spread": max(spread, self.spread),
        }
        if not self.use_sgd:
            return values
        exported = full_hf_tensors(self.model_parts, self.sd_adapter, torch.float32)
        return values | {
            "gradients": self.gradients,
            "parameters": parameters,
            "exported": {name: tensor.cpu().clone() for name, tensor in exported},
        }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()  # pyright: ignore


def merged(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], float]:
    """Returns the whole tensors of all ranks, and the largest relative difference of their copies.

    Collective. Only rank 0 keeps tensors. Pipeline stages hold different tensors. Replicas and
    tensor-parallel ranks hold copies of the same tensors, which stay equal only because the ranks
    compute the same.
    """
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(tensors))
    everything: dict[str, torch.Tensor] = {}
    spread = 0.0
    for name in sorted(set().union(*names)):
        copies: list[Any] = [None] * dist.get_world_size()
        # One tensor at a time, because a real model would fill the memory.
        dist.all_gather_object(copies, whole(tensors[name]) if name in tensors else None)
        first, *others = (copy for copy in copies if copy is not None)
        for other in others:
            distance = (other.double() - first.double()).norm()
            relative = distance / first.double().norm() if distance else distance
            spread = max(spread, relative.nan_to_num(float("inf")).item())
        if dist.get_rank() == 0:
            everything[name] = first
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
