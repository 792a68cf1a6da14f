# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Model FLOPs utilization (https://arxiv.org/abs/2204.02311): the used fraction of peak FLOPs."""

import json
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.cost import flops_cost
from torchtitan.grpo.data.shared_context import Span, cost_of, num_computed
from torchtitan.grpo.data.step_plan import StepPlan
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.scoring import scores_old_policy
from torchtitan.grpo.upstream.parallelism import utils

# Products with each weight: one in a forward pass, and two in a backward pass, which computes the
# gradients of its input and of the weight. Frozen weights have no gradient.
_FORWARD, _TRAINING, _TRAINING_FROZEN = 1, 3, 2


class Utilization:
    """Counts the FLOPs of the batches of a step.

    For a batch of T tokens, of which S are scored, in a model with N weights besides the embedding
    and the output layer, L layers and H channels of all heads::

        forward = 2 N T + 2 vocabulary dim S + 4 L H pairs

    ``pairs`` is the number of pairs of a query and a key, causal and within each sequence. A context
    that several sequences share is computed once. A training epoch counts as three forward passes (two
    for frozen weights), and the passes of old policy and reference as one each. A critic's values take
    one forward pass, and a critic has as many epochs as the policy, all without an output layer. Padding
    and recomputation are not counted. ``peak_flops`` is a rank's peak in bfloat16.
    """

    def __init__(
        self, config: JobConfig, model: HFModel, num_ranks: int, peak_flops: float
    ) -> None:
        sizes = json.loads((model.path / "config.json").read_bytes())
        self._cost = flops_cost(sizes)
        self._head = 2.0 * sizes["hidden_size"] * sizes["vocab_size"]
        self._peak = num_ranks * peak_flops
        grpo = config.grpo
        further = scores_old_policy(grpo) + (grpo.kl_coef > 0)
        self._num_epochs, self._num_forward = grpo.num_epochs, further * _FORWARD
        self._weight_passes = _TRAINING_FROZEN if config.lora.rank else _TRAINING
        self._has_critic = config.has_critic
        self._flops = 0.0

    def add(self, plan: StepPlan, *, begins_batch: bool) -> None:
        """Adds the FLOPs of all ranks' plan. If the plan ``begins_batch``, drops the FLOPs added before."""
        if begins_batch:
            self._flops = 0.0
        num_scored = sum(plan.minibatch_tokens)
        everything = [s for rows in plan.spans for row in rows for s in row]
        weights, attention = self._forward(everything, num_scored)
        self._flops += self._num_forward * (weights + attention)
        trained = _trained_spans(plan)
        weights, attention = self._forward(trained, num_scored)
        step = self._weight_passes * weights + _TRAINING * attention
        self._flops += self._num_epochs * step
        if self._has_critic:
            self._flops += sum(self._forward(everything, 0))
            self._flops += self._num_epochs * _TRAINING * sum(self._forward(trained, 0))

    def _forward(self, spans: Sequence[Span], num_scored: int) -> tuple[float, float]:
        """Returns the FLOPs of a forward pass: of products with weights, and of attention."""
        num_tokens = num_computed(spans)
        per_token = self._cost.per_token / _TRAINING
        attention = replace(self._cost, per_token=0.0)
        weights = per_token * num_tokens - self._head * (num_tokens - num_scored)
        return weights, cost_of(spans, attention) / _TRAINING

    def metrics(self, step_seconds: float) -> dict[str, float]:
        return {"time/mfu": self._flops / (step_seconds * self._peak)}


def build_utilization(trainer: Trainer, config: JobConfig, model: HFModel) -> Utilization | None:
    """Returns the counter for the devices; None on CPU, whose peak is not known."""
    if trainer.device.type == "cpu":
        return None
    peak = utils.get_peak_flops(torch.cuda.get_device_name(trainer.device))
    return Utilization(config, model, dist.get_world_size(), peak)


def _trained_spans(plan: StepPlan) -> list[Span]:
    found = []
    for rows in plan.spans:
        per_minibatch = len(rows) // plan.num_minibatches
        for index, num_tokens in enumerate(plan.minibatch_tokens):
            if num_tokens:
                begin = index * per_minibatch
                found += [s for row in rows[begin : begin + per_minibatch] for s in row]
    return found
