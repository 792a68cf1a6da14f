# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Failed calls of workers: one is data, too many in a row end the run."""

import logging
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)


class CallFailed(Exception):
    """One call of user code failed; the run continues.

    Attributes:
        kind: Cause of the failure, equal for failures with the same cause.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class FailureCount:
    """Counts failed calls by kind, and those in a row.

    Args:
        max_consecutive: Number of failures in a row that end the run.
        setting: TOML key of ``max_consecutive``, for messages.
        what: What failed, in the plural and with a verb, such as ``groups in a row could not be
            scored``.
        error: Exception that ends the run.
        on_failure: Called with each failure. By default the first of each kind is logged.

    Attributes:
        by_kind: Number of failures of each kind over the whole run.
    """

    def __init__(
        self,
        max_consecutive: int,
        setting: str,
        what: str,
        error: type[RuntimeError],
        on_failure: Callable[[CallFailed], None] | None = None,
    ) -> None:
        self.by_kind: Counter[str] = Counter()
        self._max_consecutive, self._setting = max_consecutive, setting
        self._what, self._error = what, error
        self._on_failure = on_failure or self._log_first
        self._consecutive = 0

    def record(self, failure: CallFailed) -> None:
        """Counts and reports a failure.

        Raises:
            RuntimeError: If this failure is the ``max_consecutive``-th in a row. Its type is the
                ``error`` given at construction.
        """
        self.by_kind[failure.kind] += 1
        self._on_failure(failure)
        self._consecutive += 1
        if self._consecutive >= self._max_consecutive:
            raise self._error(
                f"{self._consecutive} {self._what} "
                f"({self._setting} = {self._max_consecutive}). The last reason: {failure}"
            ) from failure

    def _log_first(self, failure: CallFailed) -> None:
        if self.by_kind[failure.kind] == 1:
            logger.warning("%s (logged once for each kind of failure)", failure)

    def record_success(self) -> None:
        """Ends a row of failures."""
        self._consecutive = 0
