# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The guard of vLLM's HTTP routes, for its option ``--middleware``.

vLLM's own key guards only the routes below ``/v1`` and ``/inference``. Pushes of weights need vLLM's
development mode, whose further routes would let clients without a key pause the server, replace its
weights, or call any method of its workers through ``/collective_rpc``.
"""

from typing import Any

from torchtitan.grpo.inference.access import RequestGuard

_OPEN = ("/health",)
# Routes that generate or only report. What vLLM has besides (LoRA adapters are loaded below /v1, too)
# needs the admin key.
_GENERATION = (
    "/inference/v1/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/models",
    "/v1/responses",
    "/detokenize",
    "/load",
    "/metrics",
    "/model_info",  # vLLM has no such route, by which the trainer tells it from other kinds
    "/tokenize",
    "/version",
)


class VllmGuard(RequestGuard):
    """Requires the admin key on all of vLLM's routes except ``/health`` and those that generation needs."""

    def __init__(self, app: Any) -> None:
        super().__init__(app, open_routes=_OPEN, generation_routes=_GENERATION)
