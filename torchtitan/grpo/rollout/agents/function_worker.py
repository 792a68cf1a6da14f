# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process that runs ``agent.function``, or environments, with many episodes in one event loop."""

import asyncio
import functools
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from torchtitan.grpo.system.functions import describe_error, failure_kind, load_function, user_line
from torchtitan.grpo.workers.channel import NotPlainData, Refused, WorkerChannel, refused

if TYPE_CHECKING:
    from torchtitan.grpo.rollout.environments.player import Player

_WHAT = "agent.function: function"
_BLOCKED_SECONDS, _LOOK_SECONDS = 5.0, 1.0
BUILTIN = {"verifiers": "torchtitan.grpo.rollout.agents.verifiers:run"}


class LoadFunction(msgspec.Struct, tag=True):
    path: str
    options: dict[str, Any]


class LoadEnvironment(msgspec.Struct, tag=True):
    """Its runs are the calls of a `Player`, and the reply has the stop strings."""

    path: str
    options: dict[str, Any]


class Run(msgspec.Struct, tag=True):
    """``variables`` are those of ``programs.Access``; a `Player` takes none."""

    number: int
    row: dict[str, Any]
    variables: dict[str, str]


class Cancel(msgspec.Struct, tag=True):
    number: int


class Ended(msgspec.Struct, tag=True):
    result: Any = None


Request = LoadFunction | LoadEnvironment | Run | Cancel

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Ended | Refused).decode


class _Episodes:
    """Runs episodes on an event loop of its own thread."""

    def __init__(self, channel: WorkerChannel[Request]) -> None:
        self._channel = channel
        self._function: Callable[..., Any] | None = None
        self._player: Player | None = None
        self._client: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="episodes", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="episode-watch", daemon=True).start()

    def _serve(self) -> None:
        """Runs the event loop, which a task ends that raises SystemExit; its process then ends too."""
        try:
            self._loop.run_forever()
        finally:
            os._exit(1)

    def _watch(self) -> None:
        """Tells where the event loop is blocked, once each time."""
        while True:
            answers = threading.Event()
            self._loop.call_soon_threadsafe(answers.set)
            if not answers.wait(_BLOCKED_SECONDS):
                frame = sys._current_frames().get(self._thread.ident or 0)
                print(
                    f"{_WHAT} has blocked its event loop for {_BLOCKED_SECONDS:g} s, and with it all "
                    "episodes of its process. Await instead, or call what blocks with "
                    "asyncio.to_thread. It is here:",
                    *traceback.format_stack(frame) if frame is not None else [],
                    sep="\n",
                    file=sys.stderr,
                    flush=True,
                )
                answers.wait()  # or until the process is killed
            time.sleep(_LOOK_SECONDS)

    def load(self, call: int, request: LoadFunction | LoadEnvironment) -> None:
        path, options = request.path, request.options
        try:
            if isinstance(request, LoadEnvironment):
                from torchtitan.grpo.rollout.environments.player import Player

                self._player = Player(path, options)
                self._channel.reply(call, Ended(self._player.stop_strings))
                return
            function = load_function(BUILTIN.get(path, path), _WHAT, BUILTIN)
            _check(function, path, options)
        except ValueError as error:
            self._channel.reply(call, refused("load", str(error)))
            return
        self._function = functools.partial(function, **options)
        self._channel.reply(call, Ended())

    def put(self, call: int, request: Run | Cancel) -> None:
        self._loop.call_soon_threadsafe(self._begin, call, request)

    def _begin(self, call: int, request: Run | Cancel) -> None:
        if isinstance(request, Run):
            task = self._loop.create_task(self._run(call, request))
            self._tasks[request.number] = task
            task.add_done_callback(lambda _: self._tasks.pop(request.number))
        elif (task := self._tasks.get(request.number)) is None:
            self._channel.reply(call, Ended())
        else:
            task.cancel()
            task.add_done_callback(lambda _: self._channel.reply(call, Ended()))

    async def _run(self, call: int, request: Run) -> None:
        try:
            if self._player is not None:
                reply: Ended | Refused = await self._played(self._player, request)
            else:
                reply = Ended(await self._result(request))
        except asyncio.CancelledError:
            return
        except BaseException as error:  # the user's function may raise anything
            traceback.print_exc(file=sys.stderr)
            reply = refused(
                failure_kind(error),
                describe_error(error) + user_line(error, self._own_function()),
            )
        try:
            self._channel.reply(call, reply)
        except NotPlainData as error:
            self._channel.reply(call, refused("bad reward", describe_error(error)))

    async def _played(self, player: "Player", request: Run) -> Ended | Refused:
        found = await player.call(**request.row)
        return found if isinstance(found, Refused) else Ended(found)

    def _own_function(self) -> Callable[..., Any]:
        assert self._function is not None, "the first request loads the function"
        return self._function

    async def _result(self, request: Run) -> Any:
        url, key = request.variables["OPENAI_BASE_URL"], request.variables["OPENAI_API_KEY"]
        return await self._own_function()(self._client_of(url, key), request.row)

    def _client_of(self, url: str, key: str) -> Any:
        """Returns a client with the key of an episode. All share their connections: a client that
        opens connections takes tens of milliseconds to make.

        It has no time limit, which the endpoint has: a long answer takes more than the client's
        usual 600 s, after which it would ask again. And no request waits for another connection.
        """
        from httpx import Limits
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        if self._client is None or self._client.is_closed():
            http = DefaultAsyncHttpxClient(limits=Limits(max_connections=None), timeout=None)
            self._client = AsyncOpenAI(
                base_url=url, api_key="of no episode", timeout=None, http_client=http
            )
        return self._client.with_options(api_key=key)


def _check(function: Callable[..., Any], path: str, options: dict[str, Any]) -> None:
    if not inspect.iscoroutinefunction(function):
        raise ValueError(
            f"{_WHAT} {path!r} must be an async function: async def run(client, row). Run other "
            "programs with agent.command."
        )
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        raise ValueError(
            f"{_WHAT} {path!r} does not take a client, a row and agent.options = {options}: {error}."
        ) from error
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{_WHAT} {path!r} gets a client of the package openai, which is not installed: run "
            f'pip install "torchtitan-grpo[agents]" ({error}).'
        ) from error


def main() -> None:
    channel = WorkerChannel(decode_request)
    episodes = _Episodes(channel)
    while (received := channel.read()) is not None:
        call, request = received
        if isinstance(request, LoadFunction | LoadEnvironment):
            episodes.load(call, request)
        else:
            episodes.put(call, request)


if __name__ == "__main__":
    main()
