# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Scores held-out prompts: during a run beside its rollouts, and without a run."""

from torchtitan.grpo.rollout.evaluation.evaluator import Evaluator, HeldOut
from torchtitan.grpo.rollout.evaluation.spare_room import SpareRoom

__all__ = ["Evaluator", "HeldOut", "SpareRoom"]
