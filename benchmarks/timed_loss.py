# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Policy losses that take a fixed time, for training on devices that are not there."""

import itertools
import time

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.policy_terms import PolicyInputs

_computed_before = time.thread_time()
_calls = itertools.count(1)


def timed(inputs: PolicyInputs, config: GRPO, *, token_seconds: float) -> torch.Tensor:
    """Sleeps for ``token_seconds`` a token, less what training has computed since the last call.

    Hence training takes equally long on each machine that computes faster than that.
    """
    global _computed_before
    computed = time.thread_time() - _computed_before
    time.sleep(max(0.0, token_seconds * int(inputs.loss_mask.sum()) - computed))
    _computed_before = time.thread_time()
    return _loss(inputs)


def paced(
    inputs: PolicyInputs, config: GRPO, *, seconds: float, every: int = 1, rest_seconds: float = 0.0
) -> torch.Tensor:
    """Sleeps for ``seconds`` in each call whose number ``every`` divides, else for ``rest_seconds``."""
    time.sleep(rest_seconds if next(_calls) % every else seconds)
    return _loss(inputs)


def _loss(inputs: PolicyInputs) -> torch.Tensor:
    return -torch.exp(inputs.logprobs - inputs.old_logprobs) * inputs.advantages
