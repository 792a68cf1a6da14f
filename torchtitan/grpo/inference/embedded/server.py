# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The HTTP routes of the embedded server, with the names and shapes of SGLang's.

The server decodes by continuous batching with Hugging Face transformers. To read the code, begin with
request.py and step_layout.py, and go on with model.py (one step) and engine.py (all steps).

The event loop never waits for the model or for a trainer. The engine's thread reports the end of
generations, and blocking operations (joining a group, committing, reading a checkpoint) run on
daemon threads. If a client disconnects, its control operation still runs to its end, and its
generation is aborted.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import cached_property
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchtitan.grpo.inference.access import AuthLevel, Keys, refusal
from torchtitan.grpo.inference.embedded import bodies
from torchtitan.grpo.inference.embedded.bodies import ModelFacts, error_response, success
from torchtitan.grpo.inference.embedded.engine import Engine, EngineError
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.updates import WeightUpdater
from torchtitan.grpo.inference.embedded.weights import Residence
from torchtitan.grpo.system.connections import answering
from torchtitan.grpo.system.monitoring.site import Health, healthz, metrics
from torchtitan.grpo.weight_wire.staging import UpdateError
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

DIALECT_VERSION = "0.5.23"
"""The SGLang version whose routes and shapes these are."""

_STUCK_SECONDS = 120.0
_COUNTS = ("num_running", "num_waiting", "num_tokens", "num_steps", "num_recomputed", "num_swaps")
_T = TypeVar("_T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EmbeddedServer:
    """Handles the routes. ``info`` holds the constant entries of ``/model_info`` and ``/server_info``."""

    def __init__(
        self,
        engine: Engine,
        updater: WeightUpdater,
        facts: ModelFacts,
        info: Mapping[str, Any],
        *,
        keys: Keys = Keys(),  # noqa: B008  (it cannot change)
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine, self.updater = engine, updater
        engine.report = self._report
        self._monitor = EngineMonitor(engine)
        self._facts = facts
        self._info = dict(info)
        self._keys = keys
        self._active_ids: set[str] = set()

    def make_app(self) -> web.Application:
        """Returns the application, which must be served with ``handler_cancellation=True``."""
        app = web.Application()
        open_, normal, control = AuthLevel.OPEN, AuthLevel.NORMAL, AuthLevel.CONTROL
        routes: list[tuple[str, str, _Handler, AuthLevel]] = [
            ("GET", "/health", self._health, open_),
            ("GET", "/ready", self._ready, open_),
            ("GET", "/healthz", self._healthz, open_),
            ("GET", "/metrics", self._metrics, normal),
            ("GET", "/model_info", self._model_info, normal),
            ("GET", "/server_info", self._server_info, normal),
            ("GET", "/v1/models", self._models, normal),
            ("GET", "/v1/loads", self._loads, normal),
            ("POST", "/generate", self._generate, normal),
            ("POST", "/v1/chat/completions", self._chat, normal),
            ("POST", "/abort_request", self._abort_request, control),
            ("POST", "/pause_generation", self._pause, control),
            ("POST", "/continue_generation", self._continue, control),
            ("POST", "/release_memory_occupation", self._sleep, control),
            ("POST", "/resume_memory_occupation", self._wake, control),
            ("POST", "/init_weights_update_group", self._init_group, control),
            ("POST", "/leave_weight_groups", self._leave_groups, control),
            ("POST", "/begin_weight_update", self._begin_update, control),
            ("POST", "/update_weights_from_distributed", self._receive, control),
            ("POST", "/update_weights_from_disk", self._load_from_disk, control),
            ("POST", "/end_weight_update", self._end_update, control),
            ("POST", "/update_weight_version", self._update_version, control),
            ("POST", "/weights_checker", self._weights_checker, control),
        ]
        for method, path, handler, level in routes:
            app.router.add_route(method, path, self._guarded(handler, level))
        return app

    def _guarded(self, handler: _Handler, level: AuthLevel) -> _Handler:
        """Returns the handler with the access checks of `access.py`, and with exceptions turned into answers."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            refused = refusal(
                level,
                self._keys,
                method=request.method,
                headers={name.lower(): value for name, value in request.headers.items()},
                local_address=_local_address(request),
            )
            if refused is not None:
                return error_response(refused.status, refused.message)
            try:
                with answering(has_key=self._keys.of(level) is not None):
                    return await handler(request)
            except (ValueError, UpdateError) as error:
                return error_response(400, str(error))
            except EngineError as error:
                return error_response(500, str(error))
            except _NoWeights as error:
                return error_response(503, str(error))

        return guarded

    # -- generation -------------------------------------------------------------------

    def _report(self, changed: list[Request]) -> None:
        """Calls ``on_end`` of finished requests on the event loop. Runs on the engine's thread."""
        for request in changed:
            if request.finish_reason is not None:
                self._loop.call_soon_threadsafe(request.on_end)

    async def _generate(self, http: web.Request) -> web.Response:
        body = await _parsed(http, bodies.GenerateBody)
        requests = body.requests(self._facts)
        await self._finished(requests)
        answers = [bodies.format_answer(request) for request in requests]
        return web.Response(
            body=msgspec.json.encode(answers if body.is_list else answers[0]),
            content_type="application/json",
        )

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self._info["model_path"], local_files_only=True)

    async def _chat(self, http: web.Request) -> web.Response:
        body = await _parsed(http, bodies.ChatBody)
        # The tokenizer is loaded for the first request, and a long text takes time.
        request = await _on_thread(lambda: body.request(self._tokenizer, self._facts))
        await self._finished([request])
        ids = [token for token in request.output_ids if token not in request.stop_ids]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return web.json_response(bodies.format_chat_answer(request, text, self._info["model_path"]))

    async def _finished(self, requests: list[Request]) -> None:
        """Submits requests and waits until they have finished. Aborts them if the client disconnects."""
        self._require_weights()
        ids = {request.request_id for request in requests}
        if taken := self._active_ids & ids:
            raise ValueError(
                f"rid must be unique among running requests, got {sorted(taken)[:3]} again."
            )
        ends = [asyncio.Event() for _ in requests]
        for request, end in zip(requests, ends, strict=True):
            request.on_end = end.set
        self._active_ids |= ids
        try:
            await asyncio.wrap_future(self.engine.submit(requests))
            for end in ends:
                await end.wait()
        finally:
            self._active_ids -= ids
            for request in requests:
                if request.finish_reason is None:
                    self.engine.abort_request(request)
        for reason in (request.finish_reason or {} for request in requests):
            if reason.get("type") == "abort" and self.engine.failure is not None:
                raise EngineError(reason["message"])

    async def _abort_request(self, http: web.Request) -> web.Response:
        body = await _parsed(http, bodies.AbortBody)
        count = await asyncio.wrap_future(self.engine.abort(None if body.abort_all else body.rid))
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
        if not self.engine.is_alive or self.engine.is_paused:
            return error_response(503, "The engine is paused or has ended.")
        self._require_weights()
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
                "is_paused": engine.is_paused,
                "asleep": engine.residence is Residence.ASLEEP,
                "max_batched_tokens": engine.step_tokens,
                **{name: getattr(engine, name) for name in _COUNTS},
                "weight_groups": self.updater.session.group_names,
            }
        )

    async def _models(self, http: web.Request) -> web.Response:
        path, length = self._info["model_path"], self._info["max_model_len"]
        card = {"id": path, "object": "model", "owned_by": "embedded", "max_model_len": length}
        return web.json_response({"object": "list", "data": [card]})

    async def _loads(self, http: web.Request) -> web.Response:
        load = self.engine.load()
        loads = {
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "token_usage": load.kv_use,
            "prefill_seconds": load.prefill_seconds,
            "decode_seconds": load.decode_seconds,
            "max_running_requests": self._info["max_running_requests"],
        }
        return web.json_response({"version": DIALECT_VERSION, "loads": [loads]})

    async def _weights_checker(self, http: web.Request) -> web.Response:
        self._require_weights()

        def read() -> dict[str, int] | Exception:
            try:
                return self.updater.table.checksums()
            except Exception as error:  # reading has changed nothing, so the engine goes on
                return error

        # On the engine's thread, so that no swap happens between two parameters.
        checksums = await asyncio.wrap_future(self.engine.run(read))
        if isinstance(checksums, Exception):
            raise checksums
        return success("Success.", ranks=[{"checksums": checksums, "dtype": self._info["dtype"]}])

    # -- control ----------------------------------------------------------------------

    async def _pause(self, http: web.Request) -> web.Response:
        await _parsed(http, bodies.PauseBody)
        await asyncio.wrap_future(self.engine.pause())
        return success("Generation paused.")

    async def _continue(self, http: web.Request) -> web.Response:
        await asyncio.wrap_future(self.engine.resume())
        return success("Generation continued.")

    async def _sleep(self, http: web.Request) -> web.Response:
        await _parsed(http, bodies.MemoryBody)
        await _on_thread(self.updater.sleep)
        return success("Asleep: weights and caches are freed.")

    async def _wake(self, http: web.Request) -> web.Response:
        await _parsed(http, bodies.MemoryBody)
        await _on_thread(self.updater.wake)
        return success("Awake. After a sleep, requests are taken when all weights were pushed.")

    def _require_weights(self) -> None:
        if (refusal := self.engine.residence.refusal) is not None:
            raise _NoWeights(refusal)

    async def _init_group(self, http: web.Request) -> web.Response:
        body = await _parsed(http, bodies.GroupBody)
        await _on_thread(lambda: self.updater.join(body))
        return success("Joined the group.")

    async def _leave_groups(self, http: web.Request) -> web.Response:
        await _on_thread(self.updater.leave_all)
        return success("Left all groups; an open update was dropped.")

    async def _begin_update(self, http: web.Request) -> web.Response:
        self.updater.begin()
        return success("Weight update begun.")

    async def _receive(self, http: web.Request) -> web.Response:
        content = await bodies.read(http)
        try:
            bucket = bodies.parse(content, BucketSpec)
            body = bodies.parse(content, bodies.BucketBody)
        except ValueError as error:
            self.updater.fail(str(error))
            raise
        arrived = self.updater.announce(
            bucket, body.group_name, sequence=body.sequence, version=body.weight_version
        )
        # Shielded: if the client disconnects, the bucket is still received.
        await asyncio.shield(asyncio.wrap_future(arrived))
        return success("Succeeded to receive the weights; end_weight_update serves them.")

    async def _load_from_disk(self, http: web.Request) -> web.Response:
        body = await _parsed(http, bodies.DiskBody)
        seconds = await _on_thread(
            lambda: self.updater.load_from_disk(body.model_path, body.weight_version)
        )
        return success("Succeeded to update the weights.", swap_seconds=seconds)

    async def _end_update(self, http: web.Request) -> web.Response:
        body = await _parsed(http, bodies.EndBody)
        message, seconds = await _on_thread(lambda: self.updater.end(body.weight_version))
        return success(message, swap_seconds=seconds)

    async def _update_version(self, http: web.Request) -> web.Response:
        body = await _parsed(http, bodies.VersionBody)
        self.updater.session.forget_base()  # deltas name the version that it had
        await asyncio.wrap_future(self.engine.set_version(body.new_version))
        return success(f"Weight version updated to {body.new_version}")


class _NoWeights(RuntimeError):
    """The server holds no weights: it is asleep, or has been woken and waits for pushed weights."""


async def _parsed(http: web.Request, kind: type[_T]) -> _T:
    return bodies.parse(await bodies.read(http), kind)


def _local_address(http: web.Request) -> str | None:
    name = None if http.transport is None else http.transport.get_extra_info("sockname")
    return name[0] if isinstance(name, tuple) else None


async def _on_thread(function: Callable[[], _T]) -> _T:
    """Runs a blocking call on a daemon thread, which cannot keep the process alive if it hangs."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # a client that leaves does not cancel it

    def target() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # the thread's boundary: raised again by the future
            future.set_exception(error)

    threading.Thread(target=target, name=f"embedded-{function.__qualname__}", daemon=True).start()
    return await asyncio.wrap_future(future)


class EngineMonitor:
    """Reports whether the server is stuck.

    That is so if its engine has ended, or if the engine has running requests and is not paused, but took no
    step between two calls of :meth:`health` more than two minutes apart.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._num_steps, self._seen_at = -1, clock()

    def health(self) -> Health:
        engine, now = self._engine, self._clock()
        is_idle = engine.num_running == 0 or engine.is_paused
        if engine.num_steps != self._num_steps or is_idle:
            self._num_steps, self._seen_at = engine.num_steps, now
        without = now - self._seen_at
        problem = None
        if not engine.is_alive:
            problem = f"The engine is not running: {engine.failure!r}."
        elif without > _STUCK_SECONDS:
            problem = (
                f"{engine.num_running} requests run, and no step was taken for {without:.0f} s."
            )
        phase = "paused" if engine.is_paused else "idle" if is_idle else "generating"
        if engine.residence is not Residence.SERVED:
            phase = engine.residence.value
        counts = {"running": engine.num_running, "waiting": engine.num_waiting}
        return Health(problem, {"phase": phase, "version": engine.version, **counts})

    def metrics(self) -> dict[str, float]:
        engine, load = self._engine, self._engine.load()
        return {
            "server/running": float(load.running),
            "server/waiting": float(load.waiting),
            "server/kv_use": float(load.kv_use or 0.0),
            "server/is_paused": float(engine.is_paused),
            "server/tokens_total": float(engine.num_tokens),
            "server/steps_total": float(engine.num_steps),
            "server/recomputed_total": float(engine.num_recomputed),
            "server/swaps_total": float(engine.num_swaps),
        }
