# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Holds the built-in reward functions, loads the user's, and scores in worker processes."""
