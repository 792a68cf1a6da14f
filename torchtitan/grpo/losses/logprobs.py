# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Logprobs of given tokens from logits."""

import torch
import torch.nn.functional as F


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each label under the tempered distribution, in float32.

    Args:
        logits: [rows, seq, vocab] float.
        labels: [rows, seq] int, any valid id where the result is not used.
        temperature: Of the sampling that is scored.

    Returns:
        [rows, seq] float32.
    """
    flat = logits.flatten(0, 1).float() / temperature
    return -F.cross_entropy(flat, labels.flatten(), reduction="none").view(labels.shape)
