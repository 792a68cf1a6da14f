# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An HTTP server with OpenAI's API, which agents call. The API key of a request identifies its episode."""

import asyncio
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.agents import chat_route, responses_route, text_route
from torchtitan.grpo.rollout.agents.episode import AgentEpisode, parsed_reward
from torchtitan.grpo.rollout.agents.exchange import Answer, BadRequest, ModelRequest
from torchtitan.grpo.rollout.agents.programs import MODEL
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.connections import answering, raise_descriptor_limit
from torchtitan.grpo.system.http_site import HttpSite, read_body

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
_MAX_CONNECTIONS = 4096
# Of connections that are not accepted yet: the episodes of a batch begin at the same time.
_BACKLOG = 1024
_WRITE_SECONDS = 60.0
_KEEPALIVE_SECONDS = 75.0
_MOST_TOLD = 32  # kinds of requests that are not answered as they ask
_IGNORED = (
    "That is ignored: the policy answers as [rollout] and [prompts] say, in free text, and calls "
    "tools as it likes. Ask for forms and calls in a message, and let the program check the answer."
)

_IDS = SimpleNamespace(read=text_route.read_ids_body, write=text_route.write_ids)
_Handler = Callable[[web.Request, AgentEpisode], Awaitable[web.StreamResponse]]


class AgentEndpoint:
    """Answers requests of the open episodes. ``seq_len`` is the longest context, in tokens."""

    def __init__(self, host: str, seq_len: int) -> None:
        self._host, self._seq_len = host, seq_len
        self._episodes: dict[str, AgentEpisode] = {}
        self._told: set[str] = set()
        app = web.Application()
        routes: list[tuple[str, str, _Handler]] = [
            ("POST", "/v1/chat/completions", functools.partial(self._complete, chat_route)),
            ("POST", "/v1/completions", functools.partial(self._complete, text_route)),
            ("POST", "/v1/responses", self._responses),
            ("POST", "/inference/v1/generate", functools.partial(self._complete, _IDS)),
            ("POST", "/v1/episodes/{name}/reward", self._reward),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{model:.*}", self._models),
            ("*", "/{path:.*}", self._unknown),
        ]
        for method, path, handler in routes:
            app.router.add_route(method, path, self._guarded(handler))
        self._site = HttpSite(app, handler_cancellation=True, keepalive_timeout=_KEEPALIVE_SECONDS)
        self.url = ""

    async def start(self) -> None:
        """Listens on a free port. Raises ValueError if ``host`` is no address of this machine."""
        most = raise_descriptor_limit(_MAX_CONNECTIONS)
        try:
            _, port = await self._site.start(self._host, 0, most, backlog=_BACKLOG)
        except OSError as error:
            raise ValueError(
                f"agent.host = {self._host!r} must be an address of this machine, on which agents "
                f"can be served: {error}."
            ) from error
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        await self._site.close()

    def open(self, episode: AgentEpisode) -> None:
        self._episodes[episode.key] = episode

    def forget(self, episode: AgentEpisode) -> None:
        self._episodes.pop(episode.key, None)

    def _guarded(self, handler: _Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wraps a handler: finds the episode, and turns exceptions into OpenAI's error objects."""

        async def guarded(http: web.Request) -> web.StreamResponse:
            scheme, _, key = http.headers.get("Authorization", "").partition(" ")
            episode = self._episodes.get(key.strip()) if scheme.lower() == "bearer" else None
            with answering(has_key=episode is not None):
                if episode is None:
                    return _error(
                        401,
                        "Send 'Authorization: Bearer KEY' with the key of an episode that runs "
                        "(OPENAI_API_KEY). The episode of this key has ended, or there was none.",
                        code="invalid_api_key",
                    )
                episode.note_request()
                try:
                    return await handler(http, episode)
                except BadRequest as error:
                    return _error(400, str(error), param=error.param, code=error.code)
                except web.HTTPException:
                    raise
                except ServerError as error:
                    return _error(503, f"The episode ends, because no server answers: {error}")
                except Exception:  # it ends the run, where the episode is awaited
                    logger.exception("A request of an agent failed")
                    return _error(500, "The run ends.")

        return guarded

    async def _complete(
        self, route: ModuleType | SimpleNamespace, http: web.Request, episode: AgentEpisode
    ) -> web.StreamResponse:
        body = await _body(http, episode)
        asked: ModelRequest = await episode.in_thread(lambda: route.read(body))
        answer = await self._answer(body, asked, episode)
        if asked.stream:
            return await _stream(http, route.stream(answer, asked), is_named=False)
        return await _send(http, route.write(answer, asked))

    async def _responses(self, http: web.Request, episode: AgentEpisode) -> web.StreamResponse:
        body = await _body(http, episode)
        earlier = episode.conversations.get(str(body.get("previous_response_id")), [])
        if body.get("previous_response_id") and not earlier:
            raise BadRequest(
                "previous_response_id must be the id of an earlier response of this episode.",
                param="previous_response_id",
            )
        asked = await episode.in_thread(lambda: responses_route.read(body, earlier))
        answer = await self._answer(body, asked, episode)
        written = responses_route.write(answer, asked)
        # Kept for `previous_response_id`; instructions are not carried over.
        own = (asked.messages or [])[bool(body.get("instructions")) :]
        items = responses_route.read_items(written["output"])
        episode.conversations[written["id"]] = [*own, *items]
        if asked.stream:
            return await _stream(http, responses_route.stream(answer, asked), is_named=True)
        return await _send(http, written)

    async def _reward(self, http: web.Request, episode: AgentEpisode) -> web.StreamResponse:
        if http.match_info["name"] not in (episode.name, "current"):
            return _error(403, f"The key is of the episode {episode.name}, and of no other one.")
        body = await _body(http, episode)
        reward = parsed_reward(body)
        if body.get("response_id") is None:
            episode.reward = reward
        else:
            episode.reward_rows(str(body["response_id"]), reward)
        return web.json_response({"id": episode.name, "reward": reward})

    async def _unknown(self, http: web.Request, episode: AgentEpisode) -> web.StreamResponse:
        text = (
            f"There is no {http.method} {http.path!r:.100} here, where the policy answers. Give "
            "clients of other models, such as those of embeddings, a base_url of their own."
        )
        self._tell(http.path, f"was answered with 404. {text}")
        return _error(404, text, code="not_found")

    async def _answer(
        self, body: dict[str, Any], asked: ModelRequest, episode: AgentEpisode
    ) -> Answer:
        for name in episode.ignored(asked):
            self._tell(name[:80], f"asks for {name!r:.80}. {_IGNORED}")
        if body.get("model") not in (None, MODEL):
            answers = f"The policy answers, whose name is {MODEL!r}."
            self._tell("model", f"asks for the model {body['model']!r:.100}. {answers}")
        return await episode.answer(asked)

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(what)
            logger.warning("A request of an agent %s (Told once.)", text)

    async def _models(self, http: web.Request, episode: AgentEpisode) -> web.StreamResponse:
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "torchtitan-grpo"}
        card["max_model_len"] = self._seq_len
        is_one = "model" in http.match_info
        return web.json_response(card if is_one else {"object": "list", "data": [card]})


async def _body(http: web.Request, episode: AgentEpisode) -> dict[str, Any]:
    try:
        received = await read_body(http, MAX_BODY_BYTES)
        body = await episode.in_thread(lambda: strict_json.loads(received.decode("utf-8-sig")))
    except (HttpProcessingError, web.RequestPayloadError) as error:
        raise BadRequest("The body is not what its headers say, or is incomplete.") from error
    except ValueError as error:
        raise BadRequest(f"The body must be JSON: {error}.") from error
    if not isinstance(body, dict):
        raise BadRequest(f"The body must be a JSON object, got a {type(body).__name__}.")
    return body


async def _stream(
    http: web.Request, events: Iterable[dict[str, Any]], *, is_named: bool
) -> web.StreamResponse:
    """Sends server-sent events. ``is_named``: with names and without an end mark, as in ``/v1/responses``."""
    parts = []
    for event in events:
        name = f"event: {event['type']}\n" if is_named else ""
        parts.append(b"%sdata: %s\n\n" % (name.encode(), _encoded(event)))
    end = [] if is_named else [b"data: [DONE]\n\n"]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    return await _written(http, response, [*parts, *end])


async def _send(http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.Response(body=_encoded(body), content_type="application/json", charset="utf-8")
    return await _written(http, response, [])


def _encoded(body: Any) -> bytes:
    """Encodes JSON by msgspec, as the module `json` would take tens of milliseconds for a long answer."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        # Half of a surrogate pair, in the name of a tool that the model wrote.
        return json.dumps(body, allow_nan=False).encode()


async def _written(
    http: web.Request, response: web.StreamResponse, parts: Iterable[bytes]
) -> web.StreamResponse:
    """Writes an answer, and drops the connection of a client that does not read it in time."""
    try:
        async with asyncio.timeout(_WRITE_SECONDS):
            await response.prepare(http)
            for part in parts:
                await response.write(part)
            await response.write_eof()
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()
    return response


def _error(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> web.Response:
    kinds = {401: "authentication_error", 403: "permission_error", 503: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    # The clients' own retries would only repeat what cannot succeed.
    return web.json_response({"error": error}, status=status, headers={"x-should-retry": "false"})
