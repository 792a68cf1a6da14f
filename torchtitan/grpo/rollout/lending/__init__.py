# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Servers on the trainer's devices, which serve while the trainer waits for rollouts."""
