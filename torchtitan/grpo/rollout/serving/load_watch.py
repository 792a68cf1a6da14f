# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Asks the servers about once per second how busy they are.

These questions never delay other work. If a server does not answer, its load is unknown, and the
server keeps receiving requests.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.serving.server_state import Server

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 1.0
_TIMEOUT_SECONDS = 2.0


async def watch_loads(servers: Mapping[str, Server], changed: Callable[[], None]) -> None:
    """Keeps ``Server.reported`` up to date, forever.

    Args:
        servers: The current servers. The mapping may change at any time.
        changed: Called after each round.
    """
    while True:
        running = [server for server in servers.values() if not server.is_down]
        await asyncio.gather(*(_ask(server) for server in running))
        changed()
        await asyncio.sleep(_PERIOD_SECONDS)


async def _ask(server: Server) -> None:
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            load = await server.client.load()
    except (ServerError, TimeoutError) as error:
        if server.reported is not None:
            reason = str(error) or f"no answer within {_TIMEOUT_SECONDS:.0f} s"
            logger.info("The load of %s is unknown: %s", server.url, reason)
        load = None
    server.report(load)
