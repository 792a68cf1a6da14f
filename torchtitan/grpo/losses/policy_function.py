# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds what ``grpo.policy_loss`` names: a built-in policy term, or a function of the user's.

A user's function is called as ``function(inputs: PolicyInputs, config: GRPO, **options)`` with
``grpo.policy_loss_options``. It returns the loss of every token, [rows, seq], with gradients
through ``inputs.logprobs``, or a :class:`PolicyTerm` with metrics. Untrained places do not count;
mismatch weight, aggregation, KL and entropy terms are applied as to built-in ones. Example::

    def mine(inputs, config, *, ceiling=1.2):
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
        losses = -ratio.clamp(max=ceiling) * inputs.advantages
        return PolicyTerm(losses, {"loss/largest_ratio": TokenMetric(ratio, "max")})
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.loss_metrics import check_token_metric
from torchtitan.grpo.losses.policy_terms import BUILTIN, PolicyFunction, PolicyInputs, PolicyTerm
from torchtitan.grpo.system.functions import load_function

_LOADED: dict[str, PolicyFunction] = {}
"""Users' functions, loaded once: a compiled loss looks a name up, and cannot import."""


def policy_function(name: str) -> PolicyFunction:
    if name in BUILTIN:
        return BUILTIN[name]
    if name not in _LOADED:
        _LOADED[name] = _as_term(load_function(name, "grpo.policy_loss", BUILTIN))
    return _LOADED[name]


def check_policy_function(config: GRPO) -> None:
    """Loads ``grpo.policy_loss`` and tries it, with its options, on two short sequences.

    Raises ValueError, which names the key, if the function cannot be loaded, does not accept the
    options, or if its result has another shape, is not finite, or has no gradient to the logprobs.
    """
    name = config.policy_loss
    function = policy_function(name)
    _check_options(function, name, config.policy_loss_options)
    inputs = example_inputs()
    try:
        losses = function(inputs, config, **config.policy_loss_options).token_losses
        (gradient,) = torch.autograd.grad(losses.sum(), inputs.logprobs)
    except (ValueError, TypeError, AttributeError, NameError, LookupError, RuntimeError) as error:
        raise ValueError(
            f"grpo.policy_loss {name!r} failed on an example with {type(error).__name__}: "
            f"{error}. It is called as function(inputs: PolicyInputs, config: GRPO, **options), "
            f"with grpo.policy_loss_options = {config.policy_loss_options}, and must return losses "
            "[rows, seq] with gradients through inputs.logprobs, or a PolicyTerm of them."
        ) from error
    if not (losses.isfinite().all() and gradient.isfinite().all()):
        raise ValueError(
            f"grpo.policy_loss {name!r} must give finite losses and gradients on an example, "
            f"got losses {losses.tolist()}, gradients {gradient.tolist()}."
        )


def example_inputs() -> PolicyInputs:
    """Returns a packed row of two short sequences, and one of padding."""
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


def _as_term(function: Callable[..., Any]) -> PolicyFunction:
    @functools.wraps(function)
    def checked(inputs: PolicyInputs, config: GRPO, **options: Any) -> PolicyTerm:
        result = function(inputs, config, **options)
        term = result if isinstance(result, PolicyTerm) else PolicyTerm(result)
        losses, shape = term.token_losses, inputs.logprobs.shape
        if not isinstance(losses, torch.Tensor) or losses.shape != shape:
            got = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(
                f"grpo.policy_loss must return a tensor {list(shape)}, one loss a token, got {got}"
            )
        for name, metric in term.metrics.items():
            if not name.removeprefix("loss/") or not name.startswith("loss/"):
                raise ValueError(
                    "The name of a metric of grpo.policy_loss must begin with 'loss/', got "
                    f"{name!r}."
                )
            check_token_metric(name, metric, shape)
        return term

    return checked


def _check_options(function: PolicyFunction, name: str, options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())[2:]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    known = {p.name: p for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL}
    choices = f"It takes {', '.join(sorted(known))}." if known else "It takes none."
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"grpo.policy_loss_options: grpo.policy_loss {name!r} has no option "
                f"{option!r}. {choices}{hint}"
            )
    missing = [n for n, p in known.items() if p.default is p.empty and n not in options]
    if missing:
        raise ValueError(
            f"grpo.policy_loss_options must set {', '.join(missing)}: grpo.policy_loss {name!r} "
            f"has no default. Got {dict(options)}."
        )
