# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Killable processes in which the user's code runs.

Reward functions and environments are the user's code: they may hang, crash, print or leak. A
thread cannot be killed, so they run in child processes of the rollout process. In reading order:
`frames` (what travels over the pipe), `worker_channel` (the worker's end of the pipe),
`worker_process` (the owner's end, with the process), `worker_owner` (starts workers, has them
load the user's code, and kills them), `failures` (failed calls, and how many of them in a row
end the run). The package imports nothing of the project but `system`.
"""
