# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Lets a process read the tables of a configuration without importing torch.

Torchtitan's tables are plain data, but the file that holds them imports torch for a method that is
not used here, and so does their package. Importing torch takes seconds, which ``--help`` and the
message about a misspelt key should not.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def without_torch() -> Iterator[None]:
    """Puts empty modules in the place of torch and of torchtitan's package of tables.

    They are gone after the block, where the true ones can be imported. Does nothing if torch has
    been imported already.
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
