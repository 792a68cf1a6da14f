# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Exit statuses of training ranks that whoever starts them must know."""

STOPPED_BY_GUARD = 3
"""A guard has stopped the run, with a checkpoint. Starting it again would lead to the same place."""
