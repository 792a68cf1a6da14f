# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checkpoints by torch's distributed checkpointing."""

import inspect
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager, ModelWrapper

_IS_CONFIGURABLE = "config" in inspect.signature(CheckpointManager.__init__).parameters


def manager_arguments(settings: Any) -> dict[str, Any]:
    """Returns the settings as a keyword argument of :class:`CheckpointManager`, some with fixed values."""
    known: dict[str, Any] = {
        **asdict(settings),
        "create_seed_checkpoint": False,
        "initial_load_in_hf": False,
        "last_save_in_hf": False,
        "initial_load_in_hf_quantized": False,
        "enable_ft_dataloader_checkpoints": False,
    }
    name = "config" if _IS_CONFIGURABLE else "checkpoint_config"
    return {name: SimpleNamespace(**known)}
