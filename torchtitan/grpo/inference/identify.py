# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds out which kind of server answers at a URL."""

from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.http import (
    API_KEY_VARIABLE,
    Answer,
    HttpConnection,
    RouteError,
    excerpt,
)
from torchtitan.grpo.types import ServerKind

# Those of a route that a server does not have. A server that is starting may answer 5xx.
_NO_SUCH_ROUTE = range(300, 500)
_EXCERPT_CHARS = 120


@dataclass(frozen=True)
class Identity:
    """The program at a URL, with its release if known; ``kind`` is ``None`` if it is unusable."""

    kind: ServerKind | None
    software: str


class WrongKind(ServerError):
    """The server is of another kind, or of none that this project knows."""

    def __init__(self, url: str, wanted: ServerKind, found: Identity) -> None:
        super().__init__(
            f'{url} must be a server of inference.kind = "{wanted}", but {found.software} answers '
            "there."
        )
        self.found = found


async def require_kind(http: HttpConnection, wanted: ServerKind) -> Identity:
    """Returns the server's identity; raises :class:`WrongKind` if it is not of the wanted kind."""
    found = await identify(http)
    if found.kind != wanted:
        raise WrongKind(http.url, wanted, found)
    return found


async def identify(http: HttpConnection) -> Identity:
    """Recognizes a server by routes that only one kind has; raises RouteError if none answers."""
    first = await _answer(http, "/model_info")
    info = _object(first)
    if "embedded" in info:
        return Identity("embedded", "the embedded server")
    if "model_path" in info:
        release = _object(await _answer(http, "/server_info")).get("version")
        return Identity("sglang", _software("SGLang", release))
    release = _object(await _answer(http, "/version")).get("version")
    owner = _owner(_object(await _answer(http, "/v1/models")))
    if owner == "vllm":
        return Identity("vllm", _software("vLLM", release))
    if owner is not None:
        return Identity(None, f"a server of {owner!r} with OpenAI's routes")
    shown = excerpt(first.body)[:_EXCERPT_CHARS]
    return Identity(
        None,
        "no inference server that this project knows "
        f"(GET /model_info was answered with {first.status}: {shown})",
    )


def _software(name: str, release: Any) -> str:
    return f"{name} {release}" if isinstance(release, str) else name


def _owner(models: dict[str, Any]) -> str | None:
    cards = models.get("data")
    if isinstance(cards, list) and cards and isinstance(cards[0], dict):
        return str(cards[0].get("owned_by", "an unknown owner"))
    return None


async def _answer(http: HttpConnection, route: str) -> Answer:
    """Asks for a route that the server may not have."""
    answer = await http.get(route, scope="generation", accept=_NO_SUCH_ROUTE)
    if answer.status in (401, 403):
        raise RouteError(
            f"{http.url}{route} answered {answer.status}: the server refuses the key. Set "
            f"inference.api_key, or {API_KEY_VARIABLE} in the trainer's environment, to the key "
            "that the server was started with.",
            answer.status,
        )
    return answer


def _object(answer: Answer) -> dict[str, Any]:
    is_object = answer.status == 200 and isinstance(answer.body, dict)
    return answer.body if is_object else {}
