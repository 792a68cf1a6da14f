# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A run starts once all of its servers are up, and not before."""

import asyncio
import socket
from collections.abc import Iterator

import pytest
from aiohttp import web

from torchtitan.grpo.config import (
    GRPO,
    Evaluation,
    Inference,
    Prompts,
    Reward,
    Rollout,
    RolloutProcessConfig,
)
from torchtitan.grpo.rollout.serving.fleet import ServerFleet
from torchtitan.grpo.types import PromptProgress


def fleet_of(*urls: str) -> ServerFleet:
    """A fleet of servers that the configuration names."""
    return ServerFleet(
        RolloutProcessConfig(
            grpo=GRPO(),
            prompts=Prompts(),
            rollout=Rollout(),
            inference=Inference(
                kind="embedded", launch=False, urls=list(urls), startup_timeout_seconds=1.0
            ),
            reward=Reward(),
            evaluation=Evaluation(),
            hf_assets_path="",
            vocab_size=128,
            eos_token_ids=[1],
            seq_len=32,
            seed=0,
            dump_folder="",
            server_gpus=[],
            start_version=0,
            progress=PromptProgress(),
        )
    )


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that refuses connections: it is bound, and nobody listens on it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


async def healthy_server() -> tuple[web.AppRunner, int]:
    """A server that answers each request for its health, and what an embedded server would tell."""
    told = {"embedded": True, "model_path": "", "data": [{}], "tp_size": 1, "vocab_size": 128}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(told)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]


@pytest.mark.parametrize("down", ["first", "second"])
def test_one_server_that_is_up_is_not_enough_to_start(unused_port: int, down: str):
    async def main() -> None:
        runner, port = await healthy_server()
        up, missing = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{unused_port}"
        both = fleet_of(*([missing, up] if down == "first" else [up, missing]))
        alone = fleet_of(up)
        try:
            with pytest.raises(TimeoutError, match=missing):
                await both.start()
            await alone.start()
            assert [server.url for server in alone.servers] == [up]
        finally:
            await both.close()
            await alone.close()
            await runner.cleanup()

    asyncio.run(main())
