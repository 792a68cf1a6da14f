# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From a reward function's name in the TOML file to the function."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan.grpo.rewards.builtin import BUILTIN

RewardFunction = Callable[..., Any]


def load_function(path: str) -> RewardFunction:
    """Finds a reward function.

    Args:
        path: ``package.module:function``, ``package.module.function``,
            ``path/to/file.py:function``, or the bare name of a built-in one.

    Raises:
        ValueError: It cannot be found or imported, or is not callable.
    """
    if path in BUILTIN:
        return BUILTIN[path]
    module_name, name = _split(path)
    module = _load_file(module_name, path) if _is_file(module_name) else _load(module_name, path)
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(
            f"Reward function {path!r}: {module_name} has no {name!r}. "
            f"It has {_public_functions(module)}."
        )
    if not callable(function):
        raise ValueError(
            f"Reward function {path!r}: {name} must be callable, got a {type(function).__name__}."
        )
    return function


def short_names(paths: Sequence[str]) -> list[str]:
    """Names for metrics: the function's own, or the whole path where two share one."""
    names = [_split(path)[1] if path not in BUILTIN else path for path in paths]
    return [
        path if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)
    ]


def call_function(
    function: RewardFunction,
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    columns: dict[str, list[Any]],
) -> Any:
    """Calls with the keywords that the function accepts, as TRL does."""
    available: dict[str, Any] = {**columns, "completion_ids": completion_ids}
    available |= {"prompts": prompts, "completions": completions}
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        accepted = {p.name for p in parameters}
        available = {name: value for name, value in available.items() if name in accepted}
    return function(**available)


def _split(path: str) -> tuple[str, str]:
    module_name, mark, name = path.rpartition(":")
    if not mark:
        module_name, mark, name = path.rpartition(".")
    if not module_name or not name.isidentifier():
        raise ValueError(
            f"Reward function {path!r} must be package.module:function, path/to/file.py:function "
            f"or one of the built-in {', '.join(sorted(BUILTIN))}. Set reward.functions."
        )
    return module_name, name


def _is_file(module_name: str) -> bool:
    return module_name.endswith(".py") or "/" in module_name


def _load(module_name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise ValueError(
            f"Reward function {path!r}: importing {module_name} failed with "
            f"{type(error).__name__}: {error}. Modules are looked up from {Path.cwd()} and in "
            "the installed packages."
        ) from error


def _load_file(file_name: str, path: str) -> ModuleType:
    file = Path(file_name).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"Reward function {path!r}: there is no file {file}.")
    spec = importlib.util.spec_from_file_location(f"grpo_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"Reward function {path!r}: {file} must be a Python file ending in .py.")
    module = importlib.util.module_from_spec(spec)
    # Pickling and dataclasses look their module up by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a file may raise anything while it runs
        raise ValueError(
            f"Reward function {path!r}: running {file} failed with {type(error).__name__}: {error}"
        ) from error
    return module


def _public_functions(module: ModuleType) -> str:
    found = sorted(
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_")
    )
    return ", ".join(found) or "no functions"
