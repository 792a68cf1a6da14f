# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Holds the built-in reward functions, loads the user's, and scores in worker processes."""

from torchtitan.grpo.rewards.score_later import ScoreLater

__all__ = ["ScoreLater"]
