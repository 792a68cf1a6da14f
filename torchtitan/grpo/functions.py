# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From a function's name in the TOML file to the user's function."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(path: str, what: str, builtin: Iterable[str]) -> Callable[..., Any]:
    """Finds a function of the user's.

    Args:
        path: ``package.module:function``, ``package.module.function`` or
            ``path/to/file.py:function``.
        what: Begins each error message: the setting, or what the function is.
        builtin: Names that the setting knows besides, for the message.

    Raises:
        ValueError: It cannot be found or imported, or is not callable.
    """
    subject = f"{what} {path!r}"
    module_name, name = split_path(path, what, builtin)
    is_file = module_name.endswith(".py") or "/" in module_name
    module = (_load_file if is_file else _load_module)(module_name, subject)
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(
            f"{subject}: {module_name} has no {name!r}. It has {_public_functions(module)}."
        )
    if not callable(function):
        raise ValueError(f"{subject}: {name} must be callable, got a {type(function).__name__}.")
    return function


def split_path(path: str, what: str, builtin: Iterable[str]) -> tuple[str, str]:
    """Module or file, and function; for the arguments see :func:`load_function`.

    Raises:
        ValueError: The path is neither.
    """
    module_name, mark, name = path.rpartition(":")
    if not mark:
        module_name, mark, name = path.rpartition(".")
    if not module_name or not name.isidentifier():
        raise ValueError(
            f"{what} {path!r} must be package.module:function, path/to/file.py:function or one of "
            f"the built-in {', '.join(sorted(builtin))}."
        )
    return module_name, name


def _load_module(module_name: str, subject: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise ValueError(
            f"{subject}: importing {module_name} failed with "
            f"{type(error).__name__}: {error}. Modules are looked up from {Path.cwd()} and in "
            "the installed packages."
        ) from error


def _load_file(file_name: str, subject: str) -> ModuleType:
    file = Path(file_name).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"{subject}: there is no file {file}.")
    spec = importlib.util.spec_from_file_location(f"grpo_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{subject}: {file} must be a Python file ending in .py.")
    module = importlib.util.module_from_spec(spec)
    # Pickling and dataclasses look their module up by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a file may raise anything while it runs
        raise ValueError(
            f"{subject}: running {file} failed with {type(error).__name__}: {error}"
        ) from error
    return module


def _public_functions(module: ModuleType) -> str:
    found = sorted(
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_")
    )
    return ", ".join(found) or "no functions"
