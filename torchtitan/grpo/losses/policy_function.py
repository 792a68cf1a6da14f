# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``grpo.policy_loss``: a built-in policy term by name, or a function of the user's.

A custom loss is a function ``(inputs: PolicyInputs, config: GRPO) -> Tensor`` that returns
the loss of every token, [rows, seq], with gradients through ``inputs.logprobs``. What it
returns where nothing is trained is not used; the mismatch weight, aggregation, KL and
entropy terms are applied as to the built-in ones. Example::

    def mine(inputs, config):
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
        return -ratio.clamp(max=1 + config.clip_high) * inputs.advantages
"""

from collections.abc import Callable
from typing import Any

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.functions import load_function
from torchtitan.grpo.losses.policy_terms import BUILTIN, PolicyFunction, PolicyInputs, PolicyTerm

_LOADED: dict[str, PolicyFunction] = {}
# Functions of the user's, loaded once: a compiled loss looks a name up, and cannot import.


def policy_function(name: str) -> PolicyFunction:
    """The function that ``grpo.policy_loss`` names.

    Raises:
        ValueError: It cannot be found or imported, or is not callable.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    if name not in _LOADED:
        _LOADED[name] = _as_term(load_function(name, "grpo.policy_loss", BUILTIN))
    return _LOADED[name]


def check_policy_function(config: GRPO) -> None:
    """Loads ``grpo.policy_loss`` and tries it on two short sequences.

    Raises:
        ValueError: With the key: it cannot be loaded, or its result has another shape, is
            not finite, or carries no gradient to the logprobs.
    """
    name = config.policy_loss
    function = policy_function(name)
    inputs = _example()
    try:
        losses = function(inputs, config).token_losses
        (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
    except (ValueError, TypeError, AttributeError, NameError, LookupError, RuntimeError) as error:
        raise ValueError(
            f"grpo.policy_loss {name!r} failed on an example with {type(error).__name__}: "
            f"{error}. It is called as function(inputs: PolicyInputs, config: GRPO) and must "
            "return losses [rows, seq] with gradients through inputs.logprobs."
        ) from error
    if not (losses.isfinite().all() and gradient.isfinite().all()):
        raise ValueError(
            f"grpo.policy_loss {name!r} must give finite losses and gradients on an example, "
            f"got losses {losses.tolist()}, gradients {gradient.tolist()}."
        )


def _as_term(function: Callable[..., Any]) -> PolicyFunction:
    def checked(inputs: PolicyInputs, config: GRPO) -> PolicyTerm:
        losses = function(inputs, config)
        if not isinstance(losses, torch.Tensor) or losses.shape != inputs.logprobs.shape:
            got = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(
                f"grpo.policy_loss must return a tensor {list(inputs.logprobs.shape)}, one loss a "
                f"token, got {got}"
            )
        nowhere = torch.zeros_like(inputs.loss_mask)
        return PolicyTerm(losses, clipped=nowhere, dual_clipped=nowhere)

    return checked


def _example() -> PolicyInputs:
    """A packed row of two sequences, and one of padding."""
    mask = torch.tensor([[False, True, True, True, True], [False] * 5])

    def masked(*values: float) -> torch.Tensor:
        return torch.where(mask, torch.tensor(values), 0.0)

    return PolicyInputs(
        logprobs=masked(0.0, -0.5, -1.0, -2.0, -0.1).requires_grad_(),
        old_logprobs=masked(0.0, -0.6, -1.0, -1.0, -0.2),
        generator_logprobs=masked(0.0, -0.6, -1.1, -1.0, -0.2),
        advantages=masked(0.0, 1.0, 1.0, -1.0, -1.0),
        entropy=masked(0.0, 0.5, 0.7, 0.3, 0.2),
        loss_mask=mask,
        sequence_ids=torch.tensor([[0, 0, 0, 1, 1], [0] * 5]),
    )
