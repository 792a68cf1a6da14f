# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The trainer that `GRPOTrainer` extends, and the parts that its constructor builds.

0.3.0: `Trainer` is in `torchtitan.trainer` and takes a `Trainer.Config`; `ModelSpec` replaces
`TrainSpec` and its registry; the learning rate's schedule moved to `components.optimizer`; the
builder of optimizers is gone.
"""

from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer import build_optimizers as build_adam
from torchtitan.protocols import train_spec
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.train import Trainer
