# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Names of the layers that may have low-rank adapters, and of the adapters' parameters."""

TARGETS = {
    "q_proj": "attention.wq",
    "k_proj": "attention.wk",
    "v_proj": "attention.wv",
    "o_proj": "attention.wo",
    "gate_proj": "feed_forward.w1",
    "up_proj": "feed_forward.w3",
    "down_proj": "feed_forward.w2",
}
"""The layers of a block that may have adapters: their last name in Hugging Face's model, and their
native name in a block."""

FACTORS = (".lora_A.weight", ".lora_B.weight")
"""How the names of an adapter's two parameters end, after the name of the target's module."""

PEFT_PREFIX = "base_model.model."
"""How PEFT's names of a model's parameters begin."""


def is_adapter(name: str) -> bool:
    """Returns whether a native name is that of an adapter's parameter."""
    return name.endswith(FACTORS)


def target_of(name: str) -> str:
    """Returns the name of the weight that an adapter's parameter changes; other names stay."""
    for factor in FACTORS:
        if name.endswith(factor):
            return name.removesuffix(factor) + ".weight"
    return name


def served_weight_of(name: str) -> str:
    """Returns the name of a weight on a server, given that of an adapter's parameter as PEFT has it.

    Names of weights stay as they are.
    """
    return target_of(name).removeprefix(PEFT_PREFIX)


def factor_of(name: str) -> str:
    """Returns which of :data:`FACTORS` an adapter's parameter is."""
    return next(factor for factor in FACTORS if name.endswith(factor))


def module_of(name: str) -> str:
    """Returns the name of the module to which a parameter belongs, or an adapter's target."""
    return target_of(name).rpartition(".")[0]
