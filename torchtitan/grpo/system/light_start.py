# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a module of the overlay without importing the whole of torchtitan first.

    python .../torchtitan/grpo/system/light_start.py torchtitan.grpo.rollout.process ARGS...

``import torchtitan`` runs an ``__init__`` that imports torch, its compiler and the
quantization packages: several seconds of one core for each process that only needs
aiohttp. This launcher puts a bare package in its place whose path holds both the overlay
and the installed torchtitan, so ``torchtitan.grpo`` and everything else stay importable.
Run it by path: started with ``-m`` it would import torchtitan itself.
"""

import os
import sys

if __name__ == "__main__":
    # Before any further import: the launcher's own folder must not be importable, its
    # `types.py` would shadow the standard library's.
    sys.path[0] = os.getcwd()

import importlib.util
import runpy
import types
from pathlib import Path

# What a child of ours is started with, before the module's name and arguments.
LIGHT_PYTHON = (sys.executable, str(Path(__file__).resolve()))


def install_bare_package() -> None:
    """Puts a ``torchtitan`` package without ``__init__`` into ``sys.modules``."""
    paths = [str(Path(__file__).resolve().parents[2])]
    spec = importlib.util.find_spec("torchtitan")
    if spec is not None and spec.submodule_search_locations:
        paths += [p for p in spec.submodule_search_locations if p not in paths]
    package = types.ModuleType("torchtitan")
    package.__path__ = paths
    sys.modules["torchtitan"] = package


if __name__ == "__main__":
    install_bare_package()
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
