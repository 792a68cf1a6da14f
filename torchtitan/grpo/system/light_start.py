# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs a module of the overlay without importing the whole of torchtitan first.

    python .../torchtitan/grpo/system/light_start.py torchtitan.grpo.rollout.process ARGS...

``import torchtitan`` imports torch and its compiler, which takes a core several seconds. Here, an empty
package with the same paths takes its place. (``python -m`` would import torchtitan itself first.)
"""

import os
import sys

if __name__ == "__main__":
    # Before any other import, so that no file of the launcher's own folder, or of the current one,
    # shadows a module of the standard library or an installed one.
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.path.append(os.getcwd())

import importlib.util
import runpy
import types
from pathlib import Path

# The command that starts a child process; the module's name and its arguments follow.
LIGHT_PYTHON = (sys.executable, str(Path(__file__).resolve()))


def install_bare_package() -> None:
    """Puts a package ``torchtitan`` without ``__init__`` into ``sys.modules``, unless it is there already."""
    if "torchtitan" in sys.modules:
        return
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
