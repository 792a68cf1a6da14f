# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[lora]`` table: training low-rank adapters instead of all weights."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class LoRA:
    """``[lora]``: training low-rank adapters (https://arxiv.org/abs/2106.09685) instead of all weights.

    Each target ``W`` becomes ``W + alpha / rank * B A``. ``W`` and all other weights of the model
    are frozen; only ``A`` and ``B`` have gradients and optimizer states. docs/how-to/lora.md
    describes how a run with adapters differs from other runs.
    """

    rank: Annotated[int, at_least(1).or_value(0, "all weights are trained")] = 0
    """Rank of the adapters: the number of rows of ``A`` and of columns of ``B``. With 0, there are
    no adapters, and the other settings of this table have no effect."""

    alpha: Annotated[float, above(0)] = 32.0
    """Scaling of the adapters: the product ``B A`` is multiplied by ``alpha / rank``. As in PEFT,
    ``A`` is initialized with random values and ``B`` with zeros, so that the initial model is
    unchanged."""

    target_modules: list[str] = field(
        default_factory=lambda: [
            *("q_proj", "k_proj", "v_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        ]
    )
    """Linear layers that get adapters, named by the last part of their name in Hugging Face's
    model, as in PEFT's ``target_modules``. The default is all linear layers. In mixture-of-experts
    models, only attention, and the feed-forward layers of dense blocks, can have adapters."""

    base_dtype: Literal["training", "bfloat16"] = "training"
    """Data type in which the frozen weights are kept. ``training`` is ``training.dtype``.
    ``bfloat16`` needs half the memory of float32, and is lossless if the model directory stores the
    weights in bfloat16. In either case, the forward pass computes in
    ``training.mixed_precision_param``, and adapters, their gradients and optimizer states have
    ``training.dtype``."""

    push: Literal["merged", "adapters"] = "merged"
    """What is sent to the servers. ``merged`` sends all weights of the model, with the adapters
    added to their targets, to servers of any kind. ``adapters`` sends only the adapters, to servers
    that add them to their own base weights. Such servers must have been started with the model of
    ``model.hf_assets_path``, and an SGLang server must have been started by this project."""
