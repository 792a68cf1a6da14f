# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Why an episode of an environment or of a program ends without a completion."""

from torchtitan.grpo.types import Generation
from torchtitan.grpo.workers.owner import CallFailed

# Exit statuses and signals of programs that something else has ended, or that ask for another try.
_ENDED_BY_OTHERS = (-9, -15, -2, -1, 75, 124, 125, 126, 127, 129, 130, 137, 143)


class EnvironmentFailed(CallFailed):
    """One episode cannot continue. ``written`` is the completion if what the policy wrote is why."""

    written: Generation | None = None

    def blame(self, written: Generation | None) -> None:
        """Sets ``written``, unless the reason may be this machine, a service or the data."""
        what, _, number = self.kind.rpartition(" ")
        is_status = what == "exit status" and int(number) not in _ENDED_BY_OTHERS
        if is_status or self.kind.startswith(("raised ", "bad reward", "bad observation")):
            self.written = written


class EnvironmentsFailing(RuntimeError):
    """The environment does not work at all, so the run must stop."""
