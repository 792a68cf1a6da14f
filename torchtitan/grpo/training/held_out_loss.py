# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Loss of held-out examples (``sft.held_out_path``) under the current weights."""

import torch

from torchtitan.grpo.data.feed import Feed, TrainBatch
from torchtitan.grpo.data.planner import StepPlanner
from torchtitan.grpo.data.step_plan import StepPlan
from torchtitan.grpo.data.supervised import ExampleStream
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.losses.objective import negative_log_likelihood
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.training.runner import ForwardRunner
from torchtitan.grpo.types import PromptProgress


class HeldOutLoss:
    """Mean negative log-likelihood of held-out completion tokens. All methods are collective.

    Each rank receives its rows once, by rank 0's ``plan``; ``is_counted`` is as in
    :class:`RankRole`.
    """

    def __init__(
        self,
        runner: ForwardRunner,
        feed: Feed,
        device: torch.device,
        plan: StepPlan | None,
        *,
        is_counted: bool,
    ) -> None:
        self._runner, self._feed, self._device = runner, feed, device
        self._is_counted = is_counted
        received = feed.receive() if plan is None else feed.send_step(plan, 0, PromptProgress())
        assert isinstance(received, TrainBatch), f"rank 0 sends rows, got {received}"
        self._rows = received.minibatches

    def compute(self) -> float:
        """Returns nats per token, the same on every rank."""
        total = torch.zeros(2, dtype=torch.float64)
        for rows in self._rows:
            output = self._runner.forward(rows.to(self._device))
            if output is not None and self._is_counted:
                is_given = (rows.ptx_weights > 0).double()
                total[0] += negative_log_likelihood(output[..., 0].double().cpu(), is_given)
                total[1] += is_given.sum()
        loss, num_tokens = self._feed.all_reduce_sum(total).tolist()
        return loss / num_tokens


def held_out_plan(config: JobConfig, model: HFModel, num_ranks: int, date: str) -> StepPlan:
    """Reads held-out examples and plans their places; DataError if the file cannot be used."""
    assert config.sft.held_out_path is not None
    path = config.sft.held_out_path
    stream = ExampleStream(config, model, path, "sft.held_out_path", date=date)
    try:
        examples = stream.all()
    finally:
        stream.close()
    return StepPlanner(config, model).plan_supervised(examples, num_ranks=num_ranks).plan
