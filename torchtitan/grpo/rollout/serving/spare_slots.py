# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Gives evaluations the places on servers that rollouts leave free.

Completions of an evaluation take no place in a server's window, so that no rollout waits for one.
They start on a server whose window has room beside the rollouts and evaluations on it, and which
reports neither a queue nor full memory. A few may always be in flight: rollouts that fill all
servers would otherwise keep an evaluation from ever ending.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.server_state import Patience
from torchtitan.grpo.types import Generation, Prompt

_MUCH_KV = 0.8
# The part of ``max_concurrent`` that may be in flight even if rollouts leave no room.
_ALWAYS = 16
_LOOK_SECONDS = 0.5


class SpareSlots:
    """Starts an evaluation's completions where they delay no rollout, with a `Dispatcher`'s interface.

    ``max_rollouts`` limits rollouts and completions of evaluations together, except for the few
    completions that may always be in flight. If ``max_concurrent`` is 0, it is ``max_rollouts``.
    """

    def __init__(self, dispatcher: Dispatcher, max_concurrent: int, max_rollouts: int) -> None:
        self._dispatcher = dispatcher
        self._max_concurrent = max_concurrent or max_rollouts
        self._max_rollouts = max_rollouts
        self._pinned: frozenset[str] = frozenset()

    @property
    def servers(self) -> Mapping[str, Server]:
        return self._dispatcher.servers

    def pin(self, urls: Collection[str]) -> None:
        """Restricts evaluations to these servers while any of them is ready. No URLs lift the restriction."""
        self._pinned = frozenset(urls)

    def choose(
        self,
        usable: Callable[[int], bool],
        *,
        prefer: str | None = None,
        has_begun: bool = False,
    ) -> Server | None:
        """Returns ``prefer`` if it may take a completion, or else the least busy server that may, if any."""
        candidates = self._dispatcher.ready(usable, self._is_allowed)
        if not has_begun:
            in_flight = self._dispatcher.in_flight_evaluation
            if in_flight >= self._max_concurrent:
                return None
            if in_flight >= max(1, self._max_concurrent // _ALWAYS):
                if in_flight + self._dispatcher.in_flight >= self._max_rollouts:
                    return None
                candidates = [server for server in candidates if self._has_place(server)]
        candidates = [server for server in candidates if server.url == prefer] or candidates
        return min(candidates, key=lambda s: (s.remaining_tokens(), len(s.jobs)), default=None)

    def submit(
        self,
        prompt: Prompt,
        server: Server,
        sampling: Sampling,
        *,
        expected_tokens: float | None = None,
    ) -> "asyncio.Task[Generation]":
        return self._dispatcher.submit(
            prompt, server, sampling, expected_tokens=expected_tokens, allowed=self._is_allowed
        )

    async def until_attested(self, seconds: float) -> None:
        await self._dispatcher.until_attested(seconds)

    def hold(self, server: Server | None = None) -> AbstractContextManager[None]:
        return self._dispatcher.hold(server, is_evaluation=True)

    def _is_allowed(self, server: Server) -> bool:
        servers = self._dispatcher.servers.values()
        is_there = any(s.url in self._pinned and s.version is not None for s in servers)
        return not is_there or server.url in self._pinned

    def _has_place(self, server: Server) -> bool:
        reported = server.reported
        if reported is not None and reported.waiting > server.num_evaluated:
            return False
        if reported is not None and (reported.kv_use or 0.0) > _MUCH_KV:
            return False
        return server.free_places() > server.num_evaluated


Places = Dispatcher | SpareSlots
"""Where completions are generated: those of rollouts, or those of an evaluation."""


async def next_server(places: Places, floor: int, former_url: str, wait_seconds: float) -> Server:
    """Waits for a server of version ``floor`` or newer; prefers the former one, which caches the prefix."""
    patience = Patience(wait_seconds)
    while True:
        server = places.choose(lambda version: version >= floor, prefer=former_url, has_begun=True)
        if server is not None:
            return server
        if patience.has_ended(places.servers.values()):
            raise ServerError(
                f"No server of policy_version {floor} or newer was ready to continue a completion "
                f"within rollout.request_timeout_seconds = {wait_seconds:g}. The previous "
                f"segment was generated on {former_url}. Check the servers' logs, or raise "
                "rollout.request_timeout_seconds."
            )
        await places.until_attested(_LOOK_SECONDS)
