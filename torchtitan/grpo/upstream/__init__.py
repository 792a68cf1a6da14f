# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The seam to torchtitan: every name that this project takes from it, a file a concern.

No other file imports torchtitan; `tests/unit_tests/grpo/test_imports.py` holds them to it. What is taken
exists in 0.2.2 and in 0.3.0, and where a name means different things, the difference is settled here.
`scripts/check_upstream.py WHEEL` compares the seam with another release. Workarounds for upstream
stand where they are applied.
"""

import sys
from types import ModuleType

_UNUSED = {
    "torchtitan.models.attention": ("VarlenMetadata", "FlexAttentionWrapper"),
    "torchtitan.components.validate": ("BaseValidator",),
}
"""Modules that upstream's trainer imports for these classes, and that no run uses: they import the compiler,
and a library of data sets."""

if "torchtitan.protocols" not in sys.modules:  # a rank that `system/light_start.py` prepared
    for name, classes in _UNUSED.items():
        stand_in = ModuleType(name)
        vars(stand_in).update({each: type(each, (), {}) for each in classes})
        sys.modules.setdefault(name, stand_in)
