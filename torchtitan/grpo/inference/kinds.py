# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes the client for a kind of server."""

import os

from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.embedded.client import EmbeddedClient
from torchtitan.grpo.inference.http import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    HttpConnection,
)
from torchtitan.grpo.inference.sglang.client import SGLangClient
from torchtitan.grpo.inference.vllm.client import VLLMClient
from torchtitan.grpo.types import ServerKind

_CLIENTS: dict[ServerKind, type[SGLangClient] | type[VLLMClient]] = {
    "embedded": EmbeddedClient,
    "sglang": SGLangClient,
    "vllm": VLLMClient,
}


def make_client(
    kind: ServerKind,
    url: str,
    *,
    api_key: str | None = None,
    admin_key: str | None = None,
    control_timeout_seconds: float = 30.0,
    request_timeout_seconds: float = 600.0,
    idle_seconds: float = 0.0,
) -> InferenceClient:
    """A client for the server at ``url``.

    Args:
        kind: ``inference.kind``.
        url: Base URL, ``http://host:port``.
        api_key: Key of generation routes; None reads ``TORCHTITAN_GRPO_API_KEY``.
        admin_key: Key of control routes; None reads ``TORCHTITAN_GRPO_ADMIN_KEY``, and
            without that the generation key is used.
        control_timeout_seconds: Bound of one control request.
        request_timeout_seconds: Bound of one completion.
        idle_seconds: See :class:`HttpConnection`.

    Raises:
        ValueError: The kind or the URL is not one.
    """
    if kind not in _CLIENTS:
        raise ValueError(f"inference.kind must be one of {sorted(_CLIENTS)}, got {kind!r}.")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"inference.urls must be like http://host:port, got {url!r}.")
    http = HttpConnection(
        url,
        api_key=api_key or os.environ.get(API_KEY_VARIABLE),
        admin_key=admin_key or os.environ.get(ADMIN_KEY_VARIABLE),
        timeout_seconds=control_timeout_seconds,
        idle_seconds=idle_seconds,
    )
    return _CLIENTS[kind](http, request_timeout_seconds=request_timeout_seconds)
