# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps the aborts of communicators apart from broadcasts that make progress.

An abort frees memory of the GPU, for which the driver may wait until the kernels of all other
broadcasts have ended, and hold up every launch meanwhile, those of training as well. An abort
therefore waits until the broadcasts that are under way have ended, and broadcasts begin after it.
Broadcasts that were given up do not count, so that all of them are aborted together.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Maximum time for which an abort waits for broadcasts, or a broadcast for aborts.
_WAIT_SECONDS = 5.0

_changed = threading.Condition()
_num_broadcasts = 0
_num_aborts = 0


@contextmanager
def broadcasting() -> Iterator[None]:
    """Holds during a broadcast, until it has ended or was given up."""
    global _num_broadcasts
    with _changed:
        _changed.wait_for(lambda: not _num_aborts, _WAIT_SECONDS)
        _num_broadcasts += 1
    try:
        yield
    finally:
        with _changed:
            _num_broadcasts -= 1
            _changed.notify_all()


@contextmanager
def aborting() -> Iterator[None]:
    """Holds during the abort of a communicator."""
    global _num_aborts
    with _changed:
        _num_aborts += 1
        _changed.wait_for(lambda: not _num_broadcasts, _WAIT_SECONDS)
    try:
        yield
    finally:
        with _changed:
            _num_aborts -= 1
            _changed.notify_all()
