# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds the class or function that makes environments, by its name in the TOML file."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.grpo import functions

_WHAT = "rollout.environment: environment"
_MODULE = "torchtitan.grpo.rollout.environments"
BUILTIN = {
    "calculator": f"{_MODULE}.calculator:Calculator",
    "verifiers": f"{_MODULE}.verifiers:VerifiersEnvironment",
}


def load_factory(path: str, options: Mapping[str, Any]) -> Callable[[], Any]:
    """Finds an environment's class, or a function that makes one.

    Args:
        path: ``package.module:Class``, ``path/to/file.py:Class``, or a built-in name.
        options: ``rollout.environment_options``, its keyword arguments.

    Returns:
        A function without arguments that makes the environment of one completion.

    Raises:
        ValueError: If the class or function cannot be found or imported, or does not accept the
            options.
    """
    factory = functions.load_function(BUILTIN.get(path, path), _WHAT, BUILTIN)
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some callables that are written in C have no signature
        return lambda: factory(**options)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ValueError(
            f"{_WHAT} {path!r} does not take rollout.environment_options = {dict(options)}: {error}."
        ) from error
    return lambda: factory(**options)


def check_environment(environment: Any, path: str) -> list[str]:
    """Checks an object that a factory has made, and returns its stop strings.

    Raises:
        ValueError: If the object is not an environment.
    """
    for name in ("reset", "step", "close"):
        if not inspect.iscoroutinefunction(getattr(environment, name, None)):
            raise ValueError(
                f"{_WHAT} {path!r} must make objects with async methods reset, step and close, "
                f"got a {type(environment).__name__} whose {name} is not an async method."
            )
    stop_strings = getattr(environment, "stop_strings", ())
    if isinstance(stop_strings, str) or not all(isinstance(s, str) and s for s in stop_strings):
        raise ValueError(
            f"{_WHAT} {path!r}: stop_strings must be a list of strings, got {stop_strings!r}."
        )
    return list(stop_strings)
