# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds a user's function by its name in the TOML file."""

import functools
import importlib
import importlib.util
import inspect
import itertools
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan.grpo.system.files import NotRegularError, check_regular

_ERROR_CHARS = 2000
# Names of errors of services and machines; an OSError of a subclass is about a file that code has named.
_OUTSIDE = re.compile(
    r"^(OS|API|Client|Protocol|InternalServer)Error\b|Timeout|[Cc]onnect|ScoreLater|MemoryError|RateLimit|"
    r"NetworkError|ProxyError|RemoteProtocolError|PayloadError|IncompleteRead|ChunkedEncoding|BadStatusLine|"
    r"BrokenResource|BlockingIO|SSLError|RpcError|URLError|MaxRetry|Unavailable|\b(gai|h)error"
)
_OUTSIDE_STATUS = {401, 402, 407, 408, 425, 429, *range(500, 600)}  # a key or quota, or later


def load_function(path: str, what: str, builtin: Iterable[str]) -> Callable[..., Any]:
    """Returns the user's function or class. Raises ValueError if it cannot be loaded.

    ``path`` is ``package.module:function``, ``package.module.function`` or
    ``path/to/file.py:function``. The error's message begins with ``what``. For a malformed ``path``,
    the message also lists the ``builtin`` functions.
    """
    subject = f"{what} {path!r}"
    module_name, name = split_path(path, what, builtin)
    find_neighbours()
    is_file = module_name.endswith(".py") or "/" in module_name
    module = (_load_file if is_file else _load_module)(module_name, subject)
    function = getattr(module, name, None)
    if function is None:
        found, own = getattr(module, "__file__", None) or "built in", f"./{module_name}.py"
        hint = f" Did you mean {own}:{name}?" if os.path.exists(own) else ""
        raise ValueError(
            f"{subject}: {module_name} ({found}) has no {name!r}. It has {_public_functions(module)}.{hint}"
        )
    if not callable(function):
        raise ValueError(f"{subject}: {name} must be callable, got a {type(function).__name__}.")
    return function


def find_neighbours() -> None:
    """Makes modules of the current folder importable. Installed modules of the same name come first."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)


def split_path(path: str, what: str, builtin: Iterable[str]) -> tuple[str, str]:
    """Splits a path into module (or file) and function; see :func:`load_function`."""
    module_name, mark, name = path.rpartition(":")
    if not mark:
        module_name, mark, name = path.rpartition(".")
    if not module_name or not name.isidentifier():
        ways = ["package.module:function", "path/to/file.py:function"]
        if names := ", ".join(sorted(builtin)):
            ways = [", ".join(ways), f"one of the built-in {names}"]
        raise ValueError(f"{what} {path!r} must be {' or '.join(ways)}.")
    return module_name, name


def describe_error(error: BaseException) -> str:
    """Returns type and text of an exception of the user's code, shortened, even if its ``str`` fails."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(its text cannot be read: {type(second).__name__})"
    return f"{type(error).__name__}: {text[:_ERROR_CHARS]}"


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, and then the members, causes and contexts of all errors yielded so far."""
    found = [error]
    for each in itertools.islice(found, 64):  # a user's chain may be a circle
        yield each
        found += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        if reason := each.__cause__ or (None if each.__suppress_context__ else each.__context__):
            found.append(reason)


def failure_kind(error: BaseException) -> str:
    """Names an exception of the user's code, after "outside" if a service or this machine may be a cause."""
    is_outside = any(map(_is_outside, chain_of(error)))
    return f"{'outside: ' if is_outside else 'raised '}{type(error).__name__}"


def _is_outside(error: BaseException) -> bool:
    for path in ("status", "status_code", "response.status_code", "response.status", "code"):
        with suppress(Exception):  # as properties of foreign classes may raise anything
            if 400 <= (status := operator.attrgetter(path)(error)) < 600:
                return status in _OUTSIDE_STATUS
    names = " ".join(each.__name__ for each in type(error).__mro__)
    no_room = "RuntimeError: (can't start new thread|.*can't allocate memory|.*out of memory)"
    return bool(_OUTSIDE.search(names) or re.match(no_room, describe_error(error)))


def code_holder(function: Callable[..., Any]) -> Any:
    """Returns the function or class behind a callable: that of a partial, or an object's ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or isinstance(function, type):
        return function
    return type(function).__call__


def user_line(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Describes where user code failed: the traceback's last line in the function's file, or else in any."""
    found = traceback.extract_tb(error.__traceback__)
    frames = [f for f in found if not f.filename.startswith("<frozen") and f.filename != __file__]
    code = getattr(inspect.unwrap(code_holder(function)), "__code__", None) if function else None
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    line = f": {frame.line}" if frame.line else ""  # that of a notebook is not known
    return f" (at {frame.filename}:{frame.lineno}, in {frame.name}{line})"


def _load_module(module_name: str, subject: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # importing a module may raise anything
        raise ValueError(
            f"{subject}: importing {module_name} failed with {describe_error(error)}{user_line(error)}. "
            f"Modules are searched in {Path.cwd()} and among the installed packages."
        ) from error


def _load_file(file_name: str, subject: str) -> ModuleType:
    file = Path(file_name).expanduser().resolve()
    try:
        check_regular(file)
    except NotRegularError as error:
        raise ValueError(f"{subject}: {error}.") from error
    except OSError as error:
        raise ValueError(f"{subject}: the file {file} does not exist.") from error
    spec = importlib.util.spec_from_file_location(f"grpo_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{subject}: {file} must be a Python file ending in .py.")
    module = importlib.util.module_from_spec(spec)
    # Pickling and dataclasses look their module up by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # running a file may raise anything
        raise ValueError(
            f"{subject}: running {file} failed with {describe_error(error)}{user_line(error)}"
        ) from error
    return module


def _public_functions(module: ModuleType) -> str:
    found = [name for name, _ in inspect.getmembers(module, inspect.isfunction) if name[0] != "_"]
    return ", ".join(found) or "no functions"
