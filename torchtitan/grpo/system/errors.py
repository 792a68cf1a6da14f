# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Expected errors, and the exit statuses of training ranks that a launcher must know."""

STOPPED_BY_GUARD = 3
"""A guard has stopped the run, with a checkpoint. Starting it again would lead to the same place."""

LAST_SAVE_FAILED = 4
"""The run has taken all its steps, but its last checkpoint could not be written. A restart at once would only
repeat the steps since the checkpoint before."""

FOLDER_LOST = 5
"""The run's folder was removed, moved, or taken over by another run. A restart would begin anew there."""

FINAL_STATUSES = (STOPPED_BY_GUARD, LAST_SAVE_FAILED, FOLDER_LOST)
"""Statuses of ranks that are not to be started again."""


class RunError(Exception):
    """An error whose message, shown without a traceback, tells what is wrong and what to do.

    If ``exit_status`` is ``None``, the process exits with 2 before training begins, and with 1 from then on.
    """

    exit_status: int | None = None


class RunFailed(RunError, RuntimeError):
    """A run that was started from Python has failed, or was ended before its last step."""

    def __init__(self, message: str, exit_status: int | None = None) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class DataError(RunError, ValueError):
    """A data file cannot be used; the message names TOML key, file and line."""
