# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How long to wait before something that has failed is tried again."""


class Backoff:
    """The pause after each of several failures in a row, which doubles each time.

    Args:
        first_seconds: Pause after the first failure.
        longest_seconds: Longest pause.
    """

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        if not 0 < first_seconds <= longest_seconds:
            raise ValueError(
                "first_seconds must be above 0 and at most longest_seconds, "
                f"got {first_seconds} and {longest_seconds}."
            )
        self._first_seconds, self._longest_seconds = first_seconds, longest_seconds
        self.num_failures = 0

    def seconds_after_failure(self) -> float:
        """Counts a failure and returns the pause after it."""
        # The exponent is bounded, because a float overflows at 2 to the power of 1024.
        doublings = min(self.num_failures, 64)
        self.num_failures += 1
        return min(self._first_seconds * 2.0**doublings, self._longest_seconds)

    def reset(self) -> None:
        """Makes the next failure count as the first one; called after a success."""
        self.num_failures = 0
