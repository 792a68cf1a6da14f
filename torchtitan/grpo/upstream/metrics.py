# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Loggers to wandb and TensorBoard."""

from typing import Any

from torchtitan.components.metrics import BaseLogger, TensorBoardLogger, WandBLogger


class WandbConfig(dict[str, Any]):
    """Settings for :class:`WandBLogger`: torchtitan 0.2 calls ``to_dict``, 0.3 wants a dictionary."""

    def to_dict(self) -> dict[str, Any]:
        return self
