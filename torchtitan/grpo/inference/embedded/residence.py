# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whether the weights are in memory. A server that sleeps frees them, and all keys and values."""

from enum import Enum


class Residence(Enum):
    """The state of the weights::

    SERVED --sleep--> ASLEEP --wake--> EMPTY --all weights pushed--> SERVED
                         ^               |
                         +---- sleep ----+

    Requests are taken only in SERVED, and updates in SERVED and EMPTY.
    """

    SERVED = "served"
    ASLEEP = "asleep"
    EMPTY = "empty"

    @property
    def refusal(self) -> str | None:
        """Why no request is taken, and what to do; ``None`` if they are."""
        if self is Residence.ASLEEP:
            return (
                "The server is asleep. Send POST /resume_memory_occupation, and then push all of the "
                "weights."
            )
        if self is Residence.EMPTY:
            return "The server has slept and holds no weights. Push all of the weights first."
        return None
