# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the rollout process reports with each batch."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.grpo.types import Rollout, RolloutGroup


@dataclass
class RolloutCounts:
    """Counted over the whole run.

    Attributes:
        failed_requests: Requests that a server did not answer with a usable completion.
        failed_groups: Groups closed because fewer than two completions succeeded.
        unscored_groups: Groups closed because fewer than two rollouts have a reward.
        expired_groups: Groups closed because a server wrote them with older weights than
            it was attested to have.
        prompts_too_long: Prompts left out.
        tokens: Tokens generated.
    """

    failed_requests: int = 0
    failed_groups: int = 0
    unscored_groups: int = 0
    expired_groups: int = 0
    prompts_too_long: int = 0
    tokens: int = 0


class RolloutMetrics:
    """Turns a batch and the counts into metrics. Counts are those since the last batch."""

    def __init__(self) -> None:
        self._last = RolloutCounts()
        self._last_time = time.monotonic()

    def of_batch(
        self,
        groups: Sequence[RolloutGroup],
        counts: RolloutCounts,
        *,
        buffered: int,
        in_flight: int,
    ) -> dict[str, float]:
        """Metrics of one batch.

        Args:
            groups: The batch.
            counts: Over the whole run until now.
            buffered: Finished groups that stay behind for later batches.
            in_flight: Completions being written now.
        """
        now = time.monotonic()
        elapsed = max(now - self._last_time, 1e-9)
        last, self._last, self._last_time = self._last, RolloutCounts(**vars(counts)), now
        return group_metrics(groups) | {
            "rollout/tokens_per_second": (counts.tokens - last.tokens) / elapsed,
            "rollout/failed_requests": float(counts.failed_requests - last.failed_requests),
            "rollout/failed_groups": float(counts.failed_groups - last.failed_groups),
            "rollout/unscored_groups": float(counts.unscored_groups - last.unscored_groups),
            "rollout/expired_groups": float(counts.expired_groups - last.expired_groups),
            "rollout/prompts_too_long": float(counts.prompts_too_long - last.prompts_too_long),
            "rollout/buffer_groups": float(buffered),
            "rollout/inflight_rollouts": float(in_flight),
        }


def group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """What the rollouts of a batch tell by themselves: rewards and lengths."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    is_full = [rollout.finish_reason == "length" for rollout in rollouts]
    return _reward_metrics(rollouts) | {
        "rollout/completion_tokens_mean": float(np.mean(lengths)),
        "rollout/length_fraction": float(np.mean(is_full)),
    }


def _reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    components: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.reward_components.items():
            components[name].append(value)
    means = {f"reward/{name}": float(np.mean(values)) for name, values in components.items()}
    return means | {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
