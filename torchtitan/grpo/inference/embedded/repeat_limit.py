# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps requests from filling the log: a line that comes again and again is written a few times."""

import logging
import time

_PERIOD_SECONDS = 60.0
_MAX_LINES = 20


class RepeatLimit(logging.Filter):
    """Lets each statement of the program log at most ``max_lines`` lines in a period.

    The first line of the next period tells how many were left out.

    Args:
        max_lines: Number of lines of one statement in one period.
        period_seconds: Length of a period.
    """

    def __init__(
        self, max_lines: int = _MAX_LINES, period_seconds: float = _PERIOD_SECONDS
    ) -> None:
        super().__init__()
        self._max_lines, self._period_seconds = max_lines, period_seconds
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        statement = (record.pathname, record.lineno)
        now = time.monotonic()
        began, count = self._counts.get(statement, (now, 0))
        if now - began >= self._period_seconds:
            left_out = max(0, count - self._max_lines)
            began, count = now, 0
            if left_out:
                record.msg = f"{record.msg} ({left_out} such lines were left out before.)"
        self._counts[statement] = (began, count + 1)
        return count < self._max_lines
