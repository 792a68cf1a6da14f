# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""When to say again that something is still waited for."""

_FIRST_SECONDS = 5.0
_LONGEST_SECONDS = 60.0


class Reminders:
    """Reminders at growing distances: by default after 5, 15, 35, 75 seconds, then each minute.

    Args:
        first_seconds: Duration of a wait at its first reminder. A shorter wait has none.
        longest_seconds: Longest distance between two reminders.
    """

    def __init__(
        self, first_seconds: float = _FIRST_SECONDS, longest_seconds: float = _LONGEST_SECONDS
    ) -> None:
        self._next = self._distance = first_seconds
        self._longest = longest_seconds

    def is_due(self, waited_seconds: float) -> bool:
        """Returns whether a reminder is due; it then counts as given."""
        if waited_seconds < self._next:
            return False
        self._distance = min(2 * self._distance, self._longest)
        self._next = waited_seconds + self._distance
        return True
