# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a server is told when it is left, whatever was broken off before."""

import asyncio
from typing import Any

from torchtitan.grpo.weight_sync.transports.group_transport import GroupConnection


class Server:
    """Notes what it is told; the first request to leave takes for ever."""

    url = "http://a"

    def __init__(self) -> None:
        self.told: list[str] = []

    async def leave_weight_groups(self) -> None:
        self.told.append("leave")
        if self.told.count("leave") == 2:  # the first one is of the join
            await asyncio.Event().wait()

    async def resume(self) -> None:
        self.told.append("resume")

    async def num_workers(self) -> int:
        return 1


def test_a_server_is_told_to_go_on_though_recovering_was_cancelled():
    async def body() -> None:
        server: Any = Server()
        connection = GroupConnection(server, [], {}, "all", timeout_seconds=60.0)
        await connection.close()
        assert server.told == []  # it was never joined
        await connection.join()
        recovering = asyncio.create_task(connection.recover())
        await asyncio.sleep(0.01)
        recovering.cancel()
        await asyncio.gather(recovering, return_exceptions=True)
        assert server.told == ["leave", "resume", "leave"]
        await connection.close()
        assert server.told == ["leave", "resume", "leave", "leave", "resume"]
        await connection.close()
        assert len(server.told) == 5

    asyncio.run(asyncio.wait_for(body(), 20))
