# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The logger of this project and of torchtitan, which is Python's root logger."""

import contextlib
import io
import logging
import os
import sys
from typing import Any

logger = logging.getLogger()


def init_logger() -> None:
    """Writes to standard output in torchtitan's format, in place of all other handlers."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        logging.Formatter("[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s")
    )
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    os.environ["KINETO_LOG_LEVEL"] = "5"  # silences torch's profiler


class _LastingFile(io.FileIO):
    """A file that drops what it cannot write, as when its reader is gone or slow, or the disk is full."""

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or len(data)  # nothing if it would block
        return len(data)


def outlive_readers() -> None:
    """Keeps prints of this process from ever failing, so that a run does not depend on its output's reader."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(OSError, AttributeError):  # closed, or no file
            old = getattr(sys, name)
            raw = io.BufferedWriter(_LastingFile(old.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=True))
