# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Imports scripts and examples, which are in no package."""

import importlib.util
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[2]


def load_script(path: str) -> ModuleType:
    """Returns the module of a file, whose path is relative to the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
