# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From a teacher's rating of a rollout to the divergence that stands in its row."""

import numpy as np

from torchtitan.grpo.losses.distillation import sampled_reverse_kl
from torchtitan.grpo.types import Rollout


def teacher_kl(rollout: Rollout) -> np.ndarray | None:
    """Returns the reverse KL of each token of a rollout; None if no teacher has rated it."""
    if rollout.teacher_logprobs is None:
        return None
    return sampled_reverse_kl(rollout.generator_logprobs, rollout.teacher_logprobs, rollout.sampled)
