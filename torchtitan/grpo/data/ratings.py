# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From a teacher's rating of a rollout to what stands in its row."""

import numpy as np

from torchtitan.grpo.losses.distillation import sampled_reverse_kl
from torchtitan.grpo.types import Rollout, TopTokens


def teacher_kl(rollout: Rollout) -> np.ndarray | None:
    """Returns the reverse KL of each token of a rollout; None if no teacher has rated it."""
    if rollout.teacher_logprobs is None:
        return None
    return sampled_reverse_kl(rollout.logprobs, rollout.teacher_logprobs, rollout.sampled)


def teacher_top(rollout: Rollout) -> TopTokens | None:
    """Returns the teacher's most likely tokens at each token of a rollout; None if there are none.

    Raises:
        ValueError: If they are not those of each completion token, or if a logprob of a sampled token
            is not finite.
    """
    top = rollout.teacher_top
    if top is None:
        return None
    num_tokens = len(rollout.token_ids)
    if top.ids.shape != top.logprobs.shape or top.ids.ndim != 2 or len(top.ids) != num_tokens:
        raise ValueError(
            f"Each of the {num_tokens} completion tokens must have the teacher's most likely tokens "
            f"and their logprobs, got {top.ids.shape} and {top.logprobs.shape}."
        )
    is_sampled = slice(None) if rollout.sampled is None else rollout.sampled
    if not np.isfinite(top.logprobs[is_sampled]).all():
        raise ValueError("Logprobs of a teacher's most likely tokens must be finite.")
    return top
