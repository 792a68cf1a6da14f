# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Metrics to wandb and TensorBoard. 0.3.0 keeps all of these names."""

from torchtitan.components import metrics
from torchtitan.components.metrics import (
    BaseLogger,
    DeviceMemStats,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
    WandBLogger,
)
