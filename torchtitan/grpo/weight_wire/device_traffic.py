# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps the aborts of communicators apart from broadcasts that make progress.

An abort frees memory of the GPU. For this the driver may wait until the kernels of all other
broadcasts have ended, and hold up every launch meanwhile, those of training as well. An abort
therefore waits until the broadcasts that are under way have ended, and broadcasts begin after
it. Broadcasts that were given up do not count, so that all of them are aborted together. An
abort that the driver does not finish no longer counts after a few seconds: it delays every
other server once, and not at each broadcast.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Maximum time for which an abort waits for broadcasts, or all broadcasts together for an abort.
_WAIT_SECONDS = 5.0

_changed = threading.Condition()
_num_broadcasts = 0
# Until when broadcasts wait for each abort that is under way.
_aborts: dict[object, float] = {}


@contextmanager
def broadcasting() -> Iterator[None]:
    """Holds during a broadcast, until it has ended or was given up."""
    global _num_broadcasts
    with _changed:
        while (seconds := max(_aborts.values(), default=0.0) - time.monotonic()) > 0:
            _changed.wait(seconds)
        _num_broadcasts += 1
    try:
        yield
    finally:
        with _changed:
            _num_broadcasts -= 1
            _changed.notify_all()


@contextmanager
def aborting() -> Iterator[None]:
    this = object()
    with _changed:
        _aborts[this] = time.monotonic() + 2 * _WAIT_SECONDS
        _changed.wait_for(lambda: not _num_broadcasts, _WAIT_SECONDS)
        _aborts[this] = time.monotonic() + _WAIT_SECONDS
    try:
        yield
    finally:
        with _changed:
            del _aborts[this]
            _changed.notify_all()
