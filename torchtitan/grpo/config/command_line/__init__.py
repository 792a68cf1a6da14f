# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads a configuration from a TOML file and the command line, and shows the pages of ``--help``.

Nothing here imports torch, so that ``--help`` and messages about mistakes appear at once.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan.grpo.system.errors import RunError


class ConfigError(RunError, ValueError):
    """A configuration that cannot be used. The message names the key and the remedy."""


@contextmanager
def refusing(rule: str = "", say: Callable[[str], str] = str) -> Iterator[None]:
    """Turns a ValueError into a ConfigError with the same message, which follows ``rule`` if one is given."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(say(f"{rule}: {error}." if rule else str(error))) from error


@contextmanager
def without_torch() -> Iterator[None]:
    """Lets the configuration's tables be imported without torch, whose import takes seconds.

    Torchtitan's tables import torch for methods that are not used here. Unless torch or these tables have
    been imported already, empty modules stand in for both until the end of the ``with`` block.
    """
    if "torch" in sys.modules or "torchtitan.config" in sys.modules:
        yield
        return
    package = types.ModuleType("torchtitan.config")
    package.__path__ = [str(Path(p, "config")) for p in sys.modules["torchtitan"].__path__]
    stand_ins = {"torch": types.ModuleType("torch"), "torchtitan.config": package}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
