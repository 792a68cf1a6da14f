# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Who may call which route, by SGLang's rule."""

import secrets
from enum import Enum


class AuthLevel(Enum):
    """What a route asks for.

    OPEN: nothing, for probes. NORMAL: the API key, where one is set. CONTROL: the admin
    key where one is set (the API key does not do), else the API key where one is set.
    """

    OPEN = "open"
    NORMAL = "normal"
    CONTROL = "control"


def is_allowed(
    level: AuthLevel, authorization: str | None, api_key: str | None, admin_api_key: str | None
) -> bool:
    """Whether a request with this ``Authorization`` header may pass."""
    if level is AuthLevel.OPEN:
        return True
    expected = (admin_api_key or api_key) if level is AuthLevel.CONTROL else api_key
    if not expected:
        return True
    scheme, _, token = (authorization or "").partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(token.encode(), expected.encode())
