# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Names of the parameters of low-rank adapters."""

FACTORS = (".lora_A.weight", ".lora_B.weight")
"""Ends of the names of an adapter's two parameters, after the name of the target's module."""

PEFT_PREFIX = "base_model.model."
"""Prefix of PEFT's names of a model's parameters."""


def is_adapter(name: str) -> bool:
    return name.endswith(FACTORS)


def target_of(name: str) -> str:
    """Returns the name of the weight that an adapter's parameter changes, and any other name unchanged."""
    for factor in FACTORS:
        if name.endswith(factor):
            return name.removesuffix(factor) + ".weight"
    return name


def served_weight_of(name: str) -> str:
    """Returns a server's name of the weight that PEFT's parameter changes, and other names unchanged."""
    return target_of(name).removeprefix(PEFT_PREFIX)


def factor_of(name: str) -> str:
    return next(factor for factor in FACTORS if name.endswith(factor))


def module_of(name: str) -> str:
    """Returns the module of a parameter, or of the weight that an adapter's parameter changes."""
    return target_of(name).rpartition(".")[0]
