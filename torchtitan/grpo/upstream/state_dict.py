# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The interface that translates a model's state dict to Hugging Face names. 0.3.0 keeps it."""

from torchtitan.protocols import BaseStateDictAdapter
