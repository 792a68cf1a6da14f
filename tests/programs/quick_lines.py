# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A training rank that tells each second, not every ten, what it waits for."""

from torchtitan import grpo_train
from torchtitan.grpo.observe import console
from torchtitan.grpo.start.entry import leave

console._TELL_SECONDS = 1.0

if __name__ == "__main__":
    leave(grpo_train.main)
