# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The seam to torchtitan: every name that this project takes from it, a file a concern.

No other file imports torchtitan; `tests/unit_tests/grpo/test_imports.py` holds them to it. The names
are those of torchtitan 0.2.2. Above them stands what became of them in 0.3.0, which replaces
`JobConfig` and TOML files with configurations in Python. `scripts/check_upstream.py WHEEL` compares
the seam with another release. Workarounds for upstream stand where they are applied.
"""
