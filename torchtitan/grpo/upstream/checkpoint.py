# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checkpoints by torch's distributed checkpointing. 0.3.0 keeps all of these names."""

from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager, ModelWrapper
