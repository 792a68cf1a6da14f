# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads what servers tell about their model."""

from typing import Any

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.http import excerpt


def card_of(body: Any, source: str) -> dict[str, Any]:
    """Returns the entry of the served model from the body of ``/v1/models``.

    Raises:
        ServerError: If there is none.
    """
    try:
        card = body["data"][0]
        if isinstance(card, dict):
            return card
    except (LookupError, TypeError):
        pass
    raise ServerError(f"{source} must list the served model, got {excerpt(body)}")


def first_architecture(config: dict[str, Any]) -> str | None:
    """Returns the first entry of ``architectures``, as in config.json."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else None


def smallest(*values: Any) -> int | None:
    """Returns the smallest of those values that are numbers of tokens."""
    numbers = [value for value in values if type(value) is int and value > 0]
    return min(numbers, default=None)
