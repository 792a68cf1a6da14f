# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The table ``[critic]``, the value model of PPO."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class Critic:
    """``[critic]``: a second trained model that estimates the reward to come, for advantages by GAE.

    It is used with ``grpo.advantage = "gae"``, has the layout of the policy, and is trained on the
    same minibatches. docs/losses.md has the formulas and the papers, and docs/how-to/critic.md says
    what it costs and when it pays.
    """

    path: str | None = None
    """Experimental: Hugging Face directory of the model that the critic starts from, or its
    name on the Hub. It must have the architecture and the sizes of the policy. With None, it is
    ``model.hf_assets_path``. The head that computes values starts at zero, unless the directory
    holds a head of one output, ``score.weight``, as reward models do."""

    lr: Annotated[float, at_least(0)] = 1e-5
    """Learning rate of the critic after the warmup. With Muon it is also that of
    matrices. All other settings of ``[optimizer]`` and ``[lr_scheduler]``, and
    ``training.max_norm``, apply to both models. verl's default is 1e-5,
    too; it is usually higher than the policy's."""

    gamma: Annotated[float, above(0).at_most(1)] = 1.0
    """Discount of each decision: a token or, with ``level = "turn"``, a turn."""

    gae_lambda: Annotated[float, at_least(0).at_most(1)] = 0.95
    """Lambda of the policy's advantages. With 1, the advantage is the reward to come minus the
    value; with 0, it is the error of the value one decision ahead."""

    whiten: bool = True
    """Shift and scale the advantages of a batch to a mean of 0 and a variance of 1 over its trained
    tokens, on all ranks together. Cannot be combined with ``rollout.stream``."""

    value_clip: Annotated[float, above(0).or_value(0, "off")] = 0.2
    """A value that moves farther than this from the one before the batch's first optimizer step gains
    nothing. Matters only if a batch takes several optimizer steps. The default is TRL's."""

    warmup_steps: Annotated[int, at_least(0)] = 0
    """Experimental: Number of steps at the beginning in which only the critic learns. The
    policy, which takes no optimizer step, is published unchanged. Its learning-rate schedule
    counts these steps as well."""

    level: Literal["token", "turn"] = "token"
    """Experimental: Whether each trained token is a decision with a value and an advantage, or
    each turn: a maximal run of trained tokens in a sequence. At turn level, the value is read
    where the turn begins, and all of its tokens have one advantage."""
