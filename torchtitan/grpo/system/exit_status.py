# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Exit statuses of training ranks that whoever starts them must know, and those of others in words."""

import signal

STOPPED_BY_GUARD = 3
"""A guard has stopped the run, with a checkpoint. Starting it again would lead to the same place."""

LAST_SAVE_FAILED = 4
"""The run has taken all its steps, but its last checkpoint could not be written. Started again at once, it
would take the steps since the one before for nothing."""

FINAL = (STOPPED_BY_GUARD, LAST_SAVE_FAILED)
"""Statuses of ranks that are not to be started again."""


def describe_status(status: int | None) -> str:
    """Returns a child's exit status in words, with the name of the signal that ended it."""
    if status is None or status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        return f"exit status {status}"
    cause = ", as the kernel ends processes if the memory is used up" if name == "SIGKILL" else ""
    return f"exit status {status} ({name}{cause})"
