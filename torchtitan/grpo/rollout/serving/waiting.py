# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Waits for a server to continue on."""

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.serving.patience import Patience
from torchtitan.grpo.rollout.serving.spare_slots import SpareSlots

_LOOK_SECONDS = 0.5


async def next_server(
    places: Dispatcher | SpareSlots, floor: int, former_url: str, wait_seconds: float
) -> Server:
    """Waits for the former server, which has the prefix, or another one of version ``floor`` or newer."""
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
