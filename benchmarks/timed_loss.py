# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A policy loss that sleeps for each trained token, for training on devices that are not there."""

import time

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.policy_terms import PolicyInputs


def timed(inputs: PolicyInputs, config: GRPO, *, token_seconds: float) -> torch.Tensor:
    time.sleep(token_seconds * int(inputs.loss_mask.sum()))
    return -torch.exp(inputs.logprobs - inputs.old_logprobs) * inputs.advantages
