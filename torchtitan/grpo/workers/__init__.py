# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Killable processes in which the user's code runs.

Reward functions and environments may hang, crash, print or leak, and a thread cannot be killed.
"""
