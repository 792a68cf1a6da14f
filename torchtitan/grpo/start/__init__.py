# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The work of ``torchtitan-grpo train`` before the training ranks exist, and until they end.

A run from Python starts that command (`from_python.py`).
"""
