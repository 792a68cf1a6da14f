# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides by SGLang's rules which key a request needs."""

import secrets
from enum import Enum


class AuthLevel(Enum):
    """Names the key that a route needs.

    OPEN: No key; for probes. NORMAL: The API key, if one is set. CONTROL: The admin key if one is
    set, in which case the API key does not suffice; else the API key, if one is set.
    """

    OPEN = "open"
    NORMAL = "normal"
    CONTROL = "control"


def is_allowed(
    level: AuthLevel, authorization: str | None, api_key: str | None, admin_api_key: str | None
) -> bool:
    """Returns whether a request with this ``Authorization`` header is allowed."""
    if level is AuthLevel.OPEN:
        return True
    expected = (admin_api_key or api_key) if level is AuthLevel.CONTROL else api_key
    if not expected:
        return True
    scheme, _, token = (authorization or "").partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(token.encode(), expected.encode())
