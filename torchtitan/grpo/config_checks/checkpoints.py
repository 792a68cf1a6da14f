# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks how checkpoints are written."""

from torchtitan.grpo.config_checks.rules import require
from torchtitan.grpo.job_config import JobConfig


def check_checkpoints(config: JobConfig) -> None:
    """Refuses ways to write checkpoints that this machine does not have."""
    if not config.checkpoint.enable:
        return
    require(
        config.checkpoint.keep_latest_k != 1,
        "checkpoint.keep_latest_k must be 0 (all) or at least 2, because a checkpoint is removed only "
        "once a newer one is whole, got 1. Set 2.",
    )
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        # Imported here, because torch takes seconds.
        import torch

        require(
            torch.cuda.is_available(),
            'checkpoint.async_mode = "async_with_pinned_mem" needs a GPU, and none is visible. Set '
            'checkpoint.async_mode = "async", which writes on a thread.',
        )
