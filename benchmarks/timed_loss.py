# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A policy loss that takes a fixed time for each trained token, for training on devices that are not there."""

import time

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.policy_terms import PolicyInputs

_computed_before = time.thread_time()


def timed(inputs: PolicyInputs, config: GRPO, *, token_seconds: float) -> torch.Tensor:
    """Sleeps for ``token_seconds`` a token, less what training has computed since the last call.

    Hence training takes equally long on each machine that computes faster than that.
    """
    global _computed_before
    computed = time.thread_time() - _computed_before
    time.sleep(max(0.0, token_seconds * int(inputs.loss_mask.sum()) - computed))
    _computed_before = time.thread_time()
    return -torch.exp(inputs.logprobs - inputs.old_logprobs) * inputs.advantages
