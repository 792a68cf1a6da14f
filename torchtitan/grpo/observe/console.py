# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Filters the messages of torchtitan and torch that reach the console."""

import logging
import warnings

from torchtitan.grpo.system.logs import init_logger, logger

# Harmless messages that every run would print, some of them on every rank or on a CPU.
_NOISE = (
    "with {\n",  # all arguments of the model, one in a line
    "Error running lspci",
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]",  # set by torchrun, overridden by upstream
    "Pipeline Parallel loss is not visible",  # it is: sums reach rank 0 from every stage
    "Mixed precision training with TP or PP",  # see models/parallelize.py
)
_NOISY_WARNINGS = (
    "DTensor random operators may not have complete support on cpu",
    # Upstream makes an autocast that is never entered.
    "In CPU autocast, but the target dtype is not supported",
    "DTensor manual_seed.. may not have complete support on cpu",
)


def init_console(level: str, *, is_rank_zero: bool) -> None:
    """Sets up torchtitan's logger. Ranks other than 0 report warnings and errors only.

    Args:
        level: ``observe.log_level``.
        is_rank_zero: Whether the current process is rank 0.
    """
    init_logger()
    logger.setLevel(level.upper() if is_rank_zero else "WARNING")
    for handler in logger.handlers:
        handler.addFilter(_is_news)
    # Matplotlib logs that it builds its font cache, once on each machine.
    logging.getLogger("matplotlib").setLevel("WARNING")
    for message in _NOISY_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(noise in message for noise in _NOISE)
