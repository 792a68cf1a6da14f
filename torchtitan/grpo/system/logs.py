# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The logger of this project and of torchtitan, which is Python's root logger."""

import logging
import os
import sys

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
