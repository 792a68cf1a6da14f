# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds out which server answers at a URL, and checks, when a server joins the run, that the run can use it.
Without this check, a wrong server would be noticed only by failed requests.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchtitan.grpo.inference.access import API_KEY_VARIABLE
from torchtitan.grpo.inference.answers import first_architecture
from torchtitan.grpo.inference.client import InferenceClient, ServerError, ServerFacts
from torchtitan.grpo.inference.http import Answer, HttpConnection, RouteError, excerpt
from torchtitan.grpo.inference.kinds import kind_row
from torchtitan.grpo.system.files import read_regular
from torchtitan.grpo.system.network import is_loopback
from torchtitan.grpo.types import ServerKind

# Those of a route that a server does not have. A server that is starting may answer 5xx.
_NO_SUCH_ROUTE = range(300, 500)
_EXCERPT_CHARS = 120


@dataclass(frozen=True)
class Identity:
    """The program at a URL, with its release if known. ``kind`` is ``None`` for an unknown program."""

    kind: ServerKind | None
    software: str


class WrongKind(ServerError):
    """The server is of another kind than the run's, or of an unknown kind."""

    def __init__(self, url: str, wanted: ServerKind, found: Identity) -> None:
        super().__init__(
            f'{url} must be a server of inference.kind = "{wanted}", but {found.software} answers '
            "there."
        )
        self.found = found


async def require_kind(http: HttpConnection, wanted: ServerKind) -> Identity:
    """Returns the server's identity. Raises :class:`WrongKind` if the server is not of the wanted kind."""
    found = await identify(http)
    if found.kind != wanted:
        raise WrongKind(http.url, wanted, found)
    return found


async def identify(http: HttpConnection) -> Identity:
    """Recognizes a server's kind by its routes. Raises RouteError if a route does not answer."""
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
    """Requests a route that the server may lack. Raises RouteError if the server refuses the key."""
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


# Settings in config.json that decide the shapes of the weights.
_SHAPES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


class WrongServer(ServerError):
    """The run cannot use the server. The message says why, and what to start in its place."""


@dataclass(frozen=True)
class ServerNeeds:
    kind: ServerKind
    model_path: str
    num_tokens: int
    length_source: str
    temperature: float
    is_launched: bool = False
    is_lent: bool = False


async def check_server(
    client: InferenceClient, needs: ServerNeeds
) -> tuple[ServerFacts, list[str]]:
    """Returns a server's facts, and warnings about it. Raises WrongServer if the run cannot use the server."""
    try:
        facts = await client.describe(needs.temperature)
        problems = [*facts.problems, *model_problems(facts, needs)]
        if not problems:
            # Both also find keys that are refused, and servers that take no weights.
            await client.num_workers()
            await client.resume()
    except ServerError as error:
        if isinstance(error, RouteError) and not error.is_refusal:
            raise
        found = error.found.kind if isinstance(error, WrongKind) else None
        raise wrong_server(client.url, needs, [str(error)], found) from error
    if problems:
        raise wrong_server(client.url, needs, [f"{facts.software}: {p}." for p in problems])
    warnings = [*facts.warnings, *release_warnings(client.url, facts, needs.kind)]
    if needs.is_lent and facts.sleep_frees == "nothing":
        option = kind_row(needs.kind).sleep_option
        how = f", and if it is started with {option}" if option else ""
        warnings.append(
            f"{client.url} runs {facts.software}, which keeps its weights and its KV cache in memory "
            "while it sleeps, so that training must find room beside them. It frees them only on a "
            f"GPU{how} (docs/servers.md)."
        )
    return facts, warnings


def wrong_server(
    url: str, needs: ServerNeeds, problems: Sequence[str], found: ServerKind | None = None
) -> WrongServer:
    """Returns an error that lists a server's problems and says what to do.

    ``found`` is the server's kind, given only if the problem is that it is of another kind than the run's.
    """
    lines = [f"The server {url} cannot be used by this run:", *(f"  - {p}" for p in problems)]
    if needs.is_launched:
        lines.append("The run has started it. Check inference.extra_args and inference.python.")
    else:
        lines += [
            "Stop what listens there, and start in its place:",
            f"  {serve_command(needs.kind, url, needs.model_path)}",
        ]
        if not is_loopback(urlsplit(url).hostname):
            lines.append(f"with {API_KEY_VARIABLE} in the environment of server and trainer")
        if found is not None:
            lines.append(f'or set inference.kind = "{found}" to use the server that is there.')
    return WrongServer("\n".join(lines))


def serve_command(kind: ServerKind, url: str, model_path: str) -> str:
    parts = urlsplit(url)
    start = ["torchtitan-grpo", "serve", kind]
    if kind_row(kind).environment is not None:
        start = ["bash", f"scripts/serve_{kind}.sh"]
    host = [] if is_loopback(parts.hostname) else ["--host", str(parts.hostname)]
    return shlex.join([*start, model_path, *host, "--port", str(parts.port)])


def model_problems(facts: ServerFacts, needs: ServerNeeds) -> list[str]:
    wanted = config_json(needs.model_path)
    problems = []
    told = {"vocab_size": facts.vocab_size}
    architecture = facts.architecture
    served = config_json(facts.model_path)
    if served:
        told = {name: served.get(name) for name in _SHAPES}
        told["vocab_size"] = facts.vocab_size or told["vocab_size"]
        architecture = architecture or first_architecture(served)
    trained = first_architecture(wanted)
    if architecture and trained and architecture != trained:
        problems.append(f"it serves a {architecture}, but the model that is trained is a {trained}")
    problems += [
        f"{name} of the model that it serves is {value}, but the model that is trained "
        f"({needs.model_path}) has {wanted[name]}"
        for name, value in told.items()
        if value is not None and wanted.get(name) is not None and value != wanted[name]
    ]
    length = facts.max_model_len
    if length is not None and length < needs.num_tokens:
        problems.append(
            f"it takes prompts and completions of at most {length} tokens together, but this run "
            f"needs {needs.num_tokens} ({needs.length_source}). Start it with --max-model-len "
            f"{needs.num_tokens} or more (--context-length for SGLang's own command), or set "
            "prompts.max_prompt_tokens or rollout.max_new_tokens to less"
        )
    return problems


def release_warnings(url: str, facts: ServerFacts, kind: ServerKind) -> list[str]:
    known = kind_row(kind).known_releases
    if not known or (facts.release or "").startswith(known):
        return []
    return [
        f"{url} runs {facts.software}; this project is tested with {', '.join(known)}. If pushes or "
        f"requests fail, install one of these with {kind_row(kind).install_script}."
    ]


def config_json(model_path: str | None) -> dict[str, Any]:
    """Returns a model's config.json, or {} if it cannot be read, for instance because it is on another host."""
    if model_path is None:
        return {}
    try:
        config = json.loads(read_regular(Path(model_path, "config.json")))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
