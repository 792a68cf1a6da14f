# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The seam to torchtitan: every name that this project imports from it, with one file per concern.

No other file imports torchtitan, as `tests/unit_tests/grpo/test_imports.py` checks. All imported names
exist in 0.2.2 and in 0.3.0. Where a name differs between the two, the seam hides the difference.
`scripts/check_upstream.py WHEEL` compares the seam with another release. Workarounds for upstream
stand where they are applied.
"""

import importlib
import sys
from types import ModuleType

_UNUSED = {
    "torchtitan.models.attention": ("VarlenMetadata", "FlexAttentionWrapper"),
    "torchtitan.components.validate": ("BaseValidator",),
}
"""Modules that upstream's protocols import, with the classes that they need. No run uses these modules,
and they import the compiler and a library of data sets."""


def _import_protocols() -> None:
    """Imports upstream's protocols with empty classes in place of what :data:`_UNUSED` lists.

    The stand-ins are removed afterwards, so that a user's module that imports these names gets the
    real classes.
    """
    names = [name for name in _UNUSED if name not in sys.modules]
    for name in names:
        stand_in = ModuleType(name)
        vars(stand_in).update({each: type(each, (), {}) for each in _UNUSED[name]})
        sys.modules[name] = stand_in
    try:
        importlib.import_module("torchtitan.protocols")
    finally:
        for name in names:
            del sys.modules[name]


if "torchtitan.protocols" not in sys.modules:
    _import_protocols()
