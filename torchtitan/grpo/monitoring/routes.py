# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The two routes, for the event loops that serve them."""

import secrets
from collections.abc import Callable, Mapping

from aiohttp import web

from torchtitan.grpo import strict_json
from torchtitan.grpo.monitoring.addresses import KEY_VARIABLE
from torchtitan.grpo.monitoring.exposition import CONTENT_TYPE, exposition
from torchtitan.grpo.monitoring.health import Health
from torchtitan.grpo.system.http_site import answered


def healthz(health: Health, *, is_allowed: bool) -> web.Response:
    """Answers ``/healthz``: 200 if the process is well, else 503.

    Args:
        health: Health of the process.
        is_allowed: Whether the client may know more than whether it is well.
    """
    body = health.body() if is_allowed else {"status": health.status}
    status = 200 if health.problem is None else 503
    return web.json_response(body, status=status, dumps=strict_json.dumps)


def metrics(values: Mapping[str, float]) -> web.Response:
    """Answers ``/metrics``."""
    return web.Response(body=exposition(values), headers={"Content-Type": CONTENT_TYPE})


class Routes:
    """The routes of a process that serves nothing else.

    Args:
        health: Returns the health of the process; called on the event loop.
        values: Returns its metrics by key; called on the event loop.
        key: Key that clients must send; empty for none.
    """

    def __init__(
        self,
        health: Callable[[], Health],
        values: Callable[[], Mapping[str, float]],
        key: str = "",
    ) -> None:
        self._health, self._values, self._key = health, values, key

    def app(self) -> web.Application:
        """Returns the aiohttp application."""
        app = web.Application(middlewares=[answered])
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        return app

    def _is_allowed(self, http: web.Request) -> bool:
        if not self._key:
            return True
        scheme, _, token = http.headers.get("Authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        return is_bearer and secrets.compare_digest(token.encode(), self._key.encode())

    async def _healthz(self, http: web.Request) -> web.Response:
        return healthz(self._health(), is_allowed=self._is_allowed(http))

    async def _metrics(self, http: web.Request) -> web.Response:
        if not self._is_allowed(http):
            message = f"Send 'Authorization: Bearer KEY', with the key of {KEY_VARIABLE}.\n"
            return web.Response(status=401, text=message)
        return metrics(self._values())
