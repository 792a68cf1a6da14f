"""The leader's calls to another rank's agent, over the channel that a run makes."""

import asyncio
import gc
import weakref
from typing import Any

import torch.distributed as dist

from torchtitan.grpo.system.rank_calls import RankCallFailed, operation, remote
from torchtitan.grpo.system.rank_channel import RankChannel
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec

SPEC = BucketSpec(("a.weight",), ("bfloat16",), ((3, 4),), (2**64 - 1,), (-1,), 6)


class SomeAgent:
    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.released = asyncio.Event()

    @operation
    async def gather(self, slot: int, version: int, is_held: bool) -> None:
        self.calls.append(["gather", slot, version, is_held])
        await self.released.wait()

    @operation
    async def drop(self, version: int) -> None:
        self.calls.append(["drop", version])
        self.released.set()

    @operation
    async def prepare(self, version: int, index: int, base: int | None) -> BucketSpec:
        self.calls.append(["prepare", version, index, base])
        return SPEC

    @operation
    async def join(self, server_url: str) -> None:
        raise RuntimeError(f"{server_url} did not come")

    @operation
    async def send(self, server_url: str, version: int, index: int, base: int | None) -> None:
        self.calls.append(["send", server_url, version, index, base])
        await asyncio.Event().wait()

    @operation
    async def leave(self, server_url: str) -> None:
        self.calls.append(["leave", server_url])

    @operation
    async def write(self, version: int, directory: str) -> None:
        raise OSError(28, "No space left on device", directory)

    async def close(self) -> None:
        self.calls.append(["close"])


async def lead(channel: RankChannel) -> dict[str, Any]:
    gc.disable()  # so that an error that is part of a cycle is seen
    agent = remote(SomeAgent, channel.call, 1, 60.0)
    gathering = asyncio.create_task(agent.gather(1, 7, True))
    await asyncio.sleep(0)  # called first, and so to arrive first
    results: dict[str, Any] = {
        "prepared": await agent.prepare(7, 0, 6) == SPEC,
        # Later calls are answered while the first is under way.
        "gathering_waits": not gathering.done(),
    }
    await agent.drop(5)
    await gathering
    failed = None
    for name, call in (
        ("join", lambda: agent.join("http://server")),
        ("write", lambda: agent.write(7, "/full")),
    ):
        try:
            await call()
        except (RankCallFailed, OSError) as error:
            results[name] = [type(error).__name__, str(error)]
            if isinstance(error, RankCallFailed):
                failed = weakref.ref(error)
    results["error_is_freed"] = failed is not None and failed() is None
    try:
        async with asyncio.timeout(0.5):
            await agent.send("http://server", 7, 0, None)
    except TimeoutError:
        results["send"] = "given up"
    hanging = asyncio.create_task(agent.send("http://server", 8, 0, None))
    await asyncio.sleep(0)
    await agent.leave("http://server")
    # The rank ends now. Nobody waits for its answers, which will not come.
    results["gone"] = []
    for call in (hanging, agent.drop(6)):
        try:
            async with asyncio.timeout(20.0):
                await call
        except RankCallFailed as error:
            results["gone"].append(str(error))
    return results


async def follow(agent: SomeAgent, channel: RankChannel) -> None:
    await asyncio.sleep(0.1)  # the first call comes before the rank serves
    serving = asyncio.create_task(channel.serve([agent]))
    while not agent.calls or agent.calls[-1][0] != "leave":
        await asyncio.sleep(0.01)
        if serving.done():
            serving.result()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def main(arguments):
    dist.init_process_group("gloo")
    channel = RankChannel(60.0, lambda lost: None)
    channel.start()
    if dist.get_rank() == 0:
        results = asyncio.run(lead(channel))
    else:
        agent = SomeAgent()
        asyncio.run(follow(agent, channel))
        results = {"calls": agent.calls}
        channel.close()
    dist.barrier()
    channel.close()
    return results
