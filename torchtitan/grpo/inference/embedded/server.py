# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The HTTP routes, with the names and shapes of SGLang's.

The event loop never waits for the model or for a trainer. The engine's thread reports the progress
of generation, and blocking operations (joining a group, receiving a chunk, reading a checkpoint)
run on threads of their own. If a client disconnects, its control operation still runs to its end,
and its generation is aborted.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from torchtitan.grpo import strict_json
from torchtitan.grpo.inference.access import AuthLevel, Keys, refusal
from torchtitan.grpo.inference.embedded.daemon_thread import run_in_thread
from torchtitan.grpo.inference.embedded.engine import Engine, EngineError, Events
from torchtitan.grpo.inference.embedded.engine_monitor import EngineMonitor
from torchtitan.grpo.inference.embedded.generate_json import (
    GenerateBody,
    ModelFacts,
    body_field,
    format_answer,
    parse_generate,
    stop_ids_of,
)
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.responses import (
    error_response,
    json_body,
    local_address,
    success,
)
from torchtitan.grpo.inference.embedded.update_json import parse_chunk
from torchtitan.grpo.inference.embedded.updates import UpdateError, WeightUpdater
from torchtitan.grpo.inference.embedded.weights import WeightTable
from torchtitan.grpo.monitoring.site import healthz, metrics
from torchtitan.grpo.system.connections import answering
from torchtitan.grpo.weight_wire.staging import StagingError

logger = logging.getLogger(__name__)

DIALECT_VERSION = "0.5.23"
"""The SGLang version whose routes and shapes these are."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EmbeddedServer:
    """Connects the engine and the updater to HTTP.

    Args:
        engine_factory: Makes the engine, given the function to which it reports events.
        updater_factory: Makes the updater for that engine.
        table: Parameters of the model, for checksums.
        facts: Facts about the model that requests are checked against.
        info: Constant entries of ``/model_info`` and ``/server_info``.
        keys: Keys that the routes need.
    """

    def __init__(
        self,
        engine_factory: Callable[[Callable[[Events], None]], Engine],
        updater_factory: Callable[[Engine], WeightUpdater],
        table: WeightTable,
        facts: ModelFacts,
        info: Mapping[str, Any],
        *,
        keys: Keys = Keys(),  # noqa: B008  (it cannot change)
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = engine_factory(self._report)
        self.updater = updater_factory(self.engine)
        self._monitor = EngineMonitor(self.engine)
        self._table = table
        self._facts = facts
        self._info = dict(info)
        self._keys = keys
        self._active_ids: set[str] = set()

    def make_app(self) -> web.Application:
        """Returns the aiohttp application. It must be served with ``handler_cancellation=True``."""
        app = web.Application()
        open_, normal, control = AuthLevel.OPEN, AuthLevel.NORMAL, AuthLevel.CONTROL
        routes: list[tuple[str, str, _Handler, AuthLevel]] = [
            ("GET", "/health", self._health, open_),
            ("GET", "/ready", self._ready, open_),
            ("GET", "/healthz", self._healthz, open_),
            ("GET", "/metrics", self._metrics, normal),
            ("GET", "/model_info", self._model_info, normal),
            ("GET", "/get_model_info", self._model_info, normal),
            ("GET", "/server_info", self._server_info, normal),
            ("GET", "/get_server_info", self._server_info, normal),
            ("GET", "/v1/models", self._models, normal),
            ("GET", "/v1/loads", self._loads, normal),
            ("POST", "/generate", self._generate, normal),
            ("POST", "/abort_request", self._abort_request, control),
            ("POST", "/pause_generation", self._pause, control),
            ("POST", "/continue_generation", self._continue, control),
            ("*", "/flush_cache", self._flush_cache, control),
            ("POST", "/init_weights_update_group", self._init_group, control),
            ("POST", "/destroy_weights_update_group", self._destroy_group, control),
            ("POST", "/leave_weight_groups", self._leave_groups, control),
            ("POST", "/begin_weight_update", self._begin_update, control),
            ("POST", "/update_weights_from_distributed", self._receive, control),
            ("POST", "/update_weights_from_disk", self._load_from_disk, control),
            ("POST", "/end_weight_update", self._end_update, control),
            ("POST", "/update_weight_version", self._update_version, control),
            ("*", "/weights_checker", self._weights_checker, control),
        ]
        for method, path, handler, level in routes:
            app.router.add_route(method, path, self._guarded(handler, level))
        return app

    def _guarded(self, handler: _Handler, level: AuthLevel) -> _Handler:
        """Adds the checks of `access.py`, and turns exceptions into answers."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            refused = refusal(
                level,
                self._keys,
                method=request.method,
                headers={name.lower(): value for name, value in request.headers.items()},
                local_address=local_address(request),
            )
            if refused is not None:
                return error_response(refused.status, refused.message)
            try:
                with answering(has_key=self._keys.of(level) is not None):
                    return await handler(request)
            except (ValueError, UpdateError, StagingError) as error:
                return error_response(400, str(error))
            except EngineError as error:
                return error_response(500, str(error))

        return guarded

    # -- generation -------------------------------------------------------------------

    def _report(self, events: Events) -> None:
        """Called on the engine's thread: schedules one call on the loop for each step."""
        self._loop.call_soon_threadsafe(_tell_listeners, events)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = parse_generate(await json_body(http), self._facts)
        async with self._submitted(body) as (requests, news):
            if body.stream:
                return await self._stream(http, body, requests, news)
            answers: list[dict[str, Any]] = [{}] * len(requests)
            for _ in requests:
                index, num_tokens, _ = await news.get()
                answers[index] = self._answer(body, requests[index], num_tokens, True)
        return web.json_response(answers if body.is_list else answers[0], dumps=strict_json.dumps)

    @asynccontextmanager
    async def _submitted(
        self, body: GenerateBody
    ) -> AsyncIterator[tuple[list[Request], asyncio.Queue[tuple[int, int, bool]]]]:
        """Submits the body's requests to the engine; on exit, unfinished ones are aborted."""
        taken = self._active_ids.intersection(body.request_ids)
        if taken or len(set(body.request_ids)) < len(body.request_ids):
            raise ValueError(
                f"rid must be unique among running requests, got {sorted(taken)[:3]} again."
            )
        news: asyncio.Queue[tuple[int, int, bool]] = asyncio.Queue()

        def listener_of(index: int) -> Callable[[int, bool], None]:
            return lambda num_tokens, finished: news.put_nowait((index, num_tokens, finished))

        requests = [
            Request(
                request_id=request_id,
                prompt_ids=prompt,
                sampling=sampling,
                stop_ids=stop_ids_of(sampling, self._facts),
                stream=body.stream,
                listener=listener_of(i),
                logprob_start=logprob_start,
                num_top=body.num_top,
            )
            for i, (request_id, prompt, sampling, logprob_start) in enumerate(
                zip(body.request_ids, body.prompts, body.sampling, body.logprob_starts, strict=True)
            )
        ]
        self._active_ids.update(body.request_ids)
        try:
            await asyncio.wrap_future(self.engine.submit(requests))
            yield requests, news
        finally:
            self._active_ids.difference_update(body.request_ids)
            for request in requests:
                if request.finish_reason is None:
                    self.engine.abort_request(request)

    async def _stream(
        self,
        http: web.Request,
        body: GenerateBody,
        requests: list[Request],
        news: "asyncio.Queue[tuple[int, int, bool]]",
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        num_open = len(requests)
        while num_open:
            index, num_tokens, finished = await news.get()
            num_open -= finished
            answer: dict[str, Any]
            try:
                answer = self._answer(body, requests[index], num_tokens, finished)
            except EngineError as error:
                # The status line has been sent, so the error is part of the stream, as in SGLang.
                answer = {"error": {"message": str(error), "code": 500}}
            if body.is_list:
                answer["index"] = index
            await response.write(b"data: " + strict_json.dumps(answer).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _answer(
        self, body: GenerateBody, request: Request, num_tokens: int, finished: bool
    ) -> dict[str, Any]:
        reason = request.finish_reason if finished else None
        if reason is not None and reason["type"] == "abort" and self.engine.failure is not None:
            raise EngineError(reason["message"])
        return format_answer(
            request, num_tokens, finished, self._facts, return_logprob=body.return_logprob
        )

    async def _abort_request(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        rid = body_field(body, "rid", str, "")
        if not rid and not body_field(body, "abort_all", bool, False):
            raise ValueError("abort_request needs a rid, which is a prefix, or abort_all = true.")
        prefix = None if body.get("abort_all") else rid
        count = await asyncio.wrap_future(self.engine.abort(prefix))
        return success(f"Aborted {count} requests.", num_aborted=count)

    # -- state ------------------------------------------------------------------------

    async def _health(self, http: web.Request) -> web.Response:
        if self.engine.is_alive:
            return success("Healthy.")
        return error_response(503, f"The engine is not running: {self.engine.failure!r}.")

    async def _healthz(self, http: web.Request) -> web.Response:
        return healthz(self._monitor.health(), is_allowed=True)

    async def _metrics(self, http: web.Request) -> web.Response:
        return metrics(self._monitor.metrics())

    async def _ready(self, http: web.Request) -> web.Response:
        if not self.engine.is_alive or self.engine.pause_mode is not None:
            return error_response(503, "The engine is paused or has ended.")
        return success("Ready.")

    async def _model_info(self, http: web.Request) -> web.Response:
        return web.json_response({**self._info, "weight_version": self.engine.version})

    async def _server_info(self, http: web.Request) -> web.Response:
        engine = self.engine
        return web.json_response(
            {
                **self._info,
                "version": DIALECT_VERSION,
                "tp_size": 1,
                "pp_size": 1,
                "dp_size": 1,
                "weight_version": engine.version,
                "pause_mode": engine.pause_mode,
                "max_batched_tokens": engine.step_tokens,
                "num_running": engine.num_running,
                "num_waiting": engine.num_waiting,
                "num_tokens": engine.num_tokens,
                "num_steps": engine.num_steps,
                "num_recomputed": engine.num_recomputed,
                "num_swaps": engine.num_swaps,
                "weight_groups": self.updater.group_names,
            }
        )

    async def _models(self, http: web.Request) -> web.Response:
        path, length = self._info["model_path"], self._info["max_model_len"]
        card = {"id": path, "object": "model", "owned_by": "embedded", "max_model_len": length}
        return web.json_response({"object": "list", "data": [card]})

    async def _loads(self, http: web.Request) -> web.Response:
        load = self.engine.load()
        return web.json_response(
            {
                "version": DIALECT_VERSION,
                "loads": [
                    {
                        "dp_rank": 0,
                        "num_running_reqs": load.running,
                        "num_waiting_reqs": load.waiting,
                        "token_usage": load.kv_use,
                        "max_running_requests": self._info["max_running_requests"],
                    }
                ],
            }
        )

    async def _weights_checker(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        if body_field(body, "action", str, "checksum") != "checksum":
            raise ValueError("weights_checker supports the action 'checksum' only.")
        # On the engine's thread, so that no swap happens between two parameters.
        checksums = await asyncio.wrap_future(self.engine.run(self._table.checksums))
        return success("Success.", ranks=[{"checksums": checksums, "algorithm": "sha256"}])

    # -- control ----------------------------------------------------------------------

    async def _pause(self, http: web.Request) -> web.Response:
        mode = body_field(await json_body(http), "mode", str, "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f"mode must be abort, retract or in_place, got {mode!r}.")
        await asyncio.wrap_future(self.engine.pause(mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        await asyncio.wrap_future(self.engine.resume())
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, http: web.Request) -> web.Response:
        # Nothing is kept from one request to the next, and the keys and values of running requests
        # are computed again when the weights change.
        return web.Response(text="Cache flushed.\n")

    async def _init_group(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        arguments = {
            "master_address": body_field(body, "master_address", str),
            "master_port": body_field(body, "master_port", int),
            "rank": body_field(body, "rank_offset", int),
            "world_size": body_field(body, "world_size", int),
            "group_name": body_field(body, "group_name", str, "weight_update_group"),
            "backend": body_field(body, "backend", str, "nccl"),
            "piece_bytes": body_field(body, "piece_bytes", int, 0),
        }
        await run_in_thread("join-group", lambda: self.updater.init_group(**arguments))
        return success("Joined the group.")

    async def _destroy_group(self, http: web.Request) -> web.Response:
        name = body_field(await json_body(http), "group_name", str, "weight_update_group")
        await run_in_thread("leave-group", lambda: self.updater.destroy_group(name))
        return success("Left the group.")

    async def _leave_groups(self, http: web.Request) -> web.Response:
        await run_in_thread("leave-groups", self.updater.leave_all)
        return success("Left all groups; an open update was dropped.")

    async def _begin_update(self, http: web.Request) -> web.Response:
        self.updater.begin()
        return success("Weight update begun.")

    async def _receive(self, http: web.Request) -> web.Response:
        try:
            bucket, arguments = parse_chunk(await json_body(http))
        except ValueError as error:
            self.updater.fail(str(error))
            raise
        arrived = self.updater.announce(bucket, **arguments)
        # Shielded: if the client disconnects, the bucket is still received.
        await asyncio.shield(asyncio.wrap_future(arrived))
        return success("Succeeded to receive the weights; end_weight_update serves them.")

    async def _load_from_disk(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        path = body_field(body, "model_path", str)
        version = body_field(body, "weight_version", str, None)
        abort_all = body_field(body, "abort_all_requests", bool, False)
        seconds = await run_in_thread(
            "load", lambda: self.updater.load_from_disk(path, version, abort_all)
        )
        return success(
            "Succeeded to update the weights.", num_paused_requests=0, swap_seconds=seconds
        )

    async def _end_update(self, http: web.Request) -> web.Response:
        version = body_field(await json_body(http), "weight_version", str, None)
        message, seconds = await run_in_thread("commit", lambda: self.updater.end(version))
        return success(message, swap_seconds=seconds)

    async def _update_version(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        version = body_field(body, "new_version", str)
        if body_field(body, "abort_all_requests", bool, True):
            await asyncio.wrap_future(self.engine.abort(None, "Aborted by update_weight_version."))
        await asyncio.wrap_future(self.engine.set_version(version))
        return success(f"Weight version updated to {version}", new_version=version)


def _tell_listeners(events: Events) -> None:
    for request, num_tokens, finished in events:
        request.listener(num_tokens, finished)
