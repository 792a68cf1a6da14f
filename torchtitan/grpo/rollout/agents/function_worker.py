# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process that runs ``agent.function``, or environments, with many episodes at a time; see `host`."""

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from torchtitan.grpo.system.functions import load_function
from torchtitan.grpo.workers.channel import Refused
from torchtitan.grpo.workers.host import Cancel, Cancelled, Host, Loaded, serve

_WHAT = "agent.function: function"
BUILTIN = {"verifiers": "torchtitan.grpo.rollout.agents.verifiers:run"}


class LoadFunction(msgspec.Struct, tag=True):
    path: str
    options: dict[str, Any]


class LoadEnvironment(msgspec.Struct, tag=True):
    """Loads an environment. The reply has its stop strings, and each later `Run` is a call of a `Player`."""

    path: str
    options: dict[str, Any]


class Run(msgspec.Struct, tag=True):
    """Calls the function, with the ``variables`` of ``programs.Access``, or a `Player`, without any."""

    number: int
    row: dict[str, Any]
    variables: dict[str, str]


class Ended(msgspec.Struct, tag=True):
    result: Any = None


decode_request = msgspec.msgpack.Decoder(LoadFunction | LoadEnvironment | Run | Cancel).decode
decode_reply = msgspec.msgpack.Decoder(Ended | Cancelled | Refused).decode


def load(request: LoadFunction | LoadEnvironment) -> Loaded:
    """Loads the function or the environment. Raises ValueError if it cannot be loaded."""
    if isinstance(request, LoadEnvironment):
        return _load_environment(request)
    path, options, clients = request.path, request.options, _Clients()
    function = load_function(BUILTIN.get(path, path), _WHAT, BUILTIN)
    _check(function, path, options)

    async def run(host: Host, request: Run) -> Ended:
        url, key = request.variables["OPENAI_BASE_URL"], request.variables["OPENAI_API_KEY"]
        return Ended(await function(clients.of(url, key), request.row, **options))

    return Loaded(f"{_WHAT} {path!r}", Ended(), run, function=function)


def _load_environment(request: LoadEnvironment) -> Loaded:
    # Imported here: it imports numpy, which agent functions do without.
    from torchtitan.grpo.rollout.environments.player import Player

    player = Player(request.path, request.options)

    async def play(host: Host, request: Run) -> Ended | Refused:
        found = await player.call(**request.row)
        return found if isinstance(found, Refused) else Ended(found)

    what = f"rollout.environment: environment {request.path!r}"
    return Loaded(what, Ended(player.stop_strings), play)


class _Clients:
    """The clients of all episodes. They share one connection pool, because creating a client with a
    pool of its own takes tens of milliseconds."""

    def __init__(self) -> None:
        self._first: Any = None

    def of(self, url: str, key: str) -> Any:
        """Returns a client with the key of an episode.

        The client has no timeout, because the endpoint has one. By default the client would repeat a
        request after 600 s, but long answers take longer. The number of connections is not limited.
        """
        from httpx import Limits
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        if self._first is None or self._first.is_closed():
            http = DefaultAsyncHttpxClient(limits=Limits(max_connections=None), timeout=None)
            self._first = AsyncOpenAI(
                base_url=url, api_key="of no episode", timeout=None, http_client=http
            )
        return self._first.with_options(api_key=key)


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


if __name__ == "__main__":
    serve(decode_request, load)
