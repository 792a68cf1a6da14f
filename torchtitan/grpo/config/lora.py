# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[lora]`` table: training low-rank adapters instead of all weights."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class LoRA:
    """``[lora]``: training low-rank adapters (https://arxiv.org/abs/2106.09685) instead of all weights.

    Each target ``W`` becomes ``W + alpha / rank * B A``. ``W`` is frozen, as are all other weights
    of the model; only ``A`` and ``B`` have gradients and optimizer states. docs/how-to/lora.md tells
    how a run with adapters differs.
    """

    rank: Annotated[int, at_least(1).or_value(0, "all weights are trained")] = 0
    """Rank of the adapters: the number of rows of ``A`` and of columns of ``B``. With 0 there are no
    adapters, and the other settings of this table have no effect."""

    alpha: Annotated[float, above(0)] = 32.0
    """The product ``B A`` is scaled by ``alpha / rank``. ``A`` begins with random values and ``B`` with
    zeros, as in PEFT, so that the run begins with the model as it is."""

    target_modules: list[str] = field(
        default_factory=lambda: [
            *("q_proj", "k_proj", "v_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        ]
    )
    """Linear layers that get adapters, by their last name in Hugging Face's model, as PEFT's
    ``target_modules``. The default is all of them. In mixtures of experts only attention, and the
    feed-forward layers of dense blocks, can have adapters."""

    base_dtype: Literal["training", "bfloat16"] = "training"
    """Dtype in which the frozen weights are kept. ``training`` is ``training.dtype``. ``bfloat16`` halves
    their memory against float32 and loses nothing if the directory holds them in it. The forward
    pass computes in ``training.mixed_precision_param`` in either case, and adapters, their gradients
    and optimizer states have ``training.dtype``."""

    push: Literal["merged", "adapters"] = "merged"
    """What travels to the servers. ``merged`` sends all weights of the model, with the adapters added
    to their targets, to servers of any kind. ``adapters`` sends adapters alone, to servers that
    add them to their own base weights; they must have been started with the model of
    ``model.hf_assets_path``, and an SGLang server must have been started by this project."""
