# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes function objects that a script passes as settings into files, so that settings can name them.

The processes that call the functions load these files like those that a user has written.
"""

import hashlib
import io
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle

from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.system.files import write_whole
from torchtitan.grpo.system.functions import describe_error

_CODE = """\
# Written by torchtitan.grpo.run, to which {name} was given as an object.
import pickle
import sys
from pathlib import Path

# The modules that it uses may be beside the script that it comes from.
sys.path += [path for path in {paths!r} if path not in sys.path]
globals()[{name!r}] = pickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
"""


class _Pickler(cloudpickle.Pickler):
    """A pickler that keeps the names of source files, which cloudpickle replaces, for error messages."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, CodeType) or not os.path.isfile(obj.co_filename):
            return super().reducer_override(obj)
        make, values, *_ = self.dispatch_table[CodeType](obj)
        return make, tuple(obj.co_filename if v == "<dynamic-code>" else v for v in values)


class FunctionFiles:
    """Files in ``folder`` whose names have a hash of their content, so that a resumed run finds the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents: dict[Path, bytes] = {}
        self._settings: dict[int, str] = {}
        self._names = Counter[str]()

    def setting(self, function: Callable[..., Any]) -> str:
        """Returns ``path/to/file.py:name`` for a function. Raises ConfigError if it cannot be pickled."""
        if id(function) not in self._settings:
            self._settings[id(function)] = self._add(function, self._free_name(function))
        return self._settings[id(function)]

    def write(self) -> None:
        for path, content in self._contents.items():
            if not path.exists():
                write_whole(path, content)

    def _free_name(self, function: Callable[..., Any]) -> str:
        """The function's own name, which metrics show, with a number if another function has it."""
        named = getattr(function, "func", function)  # functools.partial has no name
        name = str(getattr(named, "__name__", type(named).__name__))
        name = name if name.isidentifier() else "function"  # a lambda
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}_{self._names[name]}"

    def _add(self, function: Callable[..., Any], name: str) -> str:
        try:
            _Pickler(buffer := io.BytesIO()).dump(function)
        except Exception as error:  # the user's objects may raise anything
            raise ConfigError(
                f"A function is pickled for the processes that call it, which failed for {name} with "
                f"{describe_error(error)}. Have it use no locks, open files, connections or generators "
                "of your script: make these inside of the function, or name the function by its file "
                f"(my_file.py:{name})."
            ) from error
        paths = [os.path.abspath(path) for path in sys.path if path]
        code = _CODE.format(name=name, paths=paths).encode()
        pickled = buffer.getvalue()
        digest = hashlib.sha256(code + pickled).hexdigest()[:16]
        file = self._folder / f"{name}-{digest}.py"
        self._contents |= {file.with_suffix(".pickle"): pickled, file: code}
        return f"{file}:{name}"
