# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Killable processes in which the user's code runs.

Reward functions and environments may hang, crash, print or leak, and a thread cannot be killed. In
reading order: `channel` (the frames of the pipe, and the worker's end), `process` (one process and the
owner's end), `owner` (starts and kills workers, counts failed calls).
"""
