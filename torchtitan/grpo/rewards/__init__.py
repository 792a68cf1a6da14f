# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reward functions: the built-in ones, loading the user's, and scoring in worker processes."""
