# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The seam to torchtitan: every name that this project takes from it, a file a concern.

No other file imports torchtitan; `tests/unit_tests/grpo/test_imports.py` holds them to it. What is taken
exists in 0.2.2 and in 0.3.0, and where a name means different things, the difference is settled here.
`scripts/check_upstream.py WHEEL` compares the seam with another release. Workarounds for upstream
stand where they are applied.
"""
