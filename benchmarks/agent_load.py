# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures what the endpoint of agents adds to each request, and whether its memory stays flat.

    python benchmarks/agent_load.py [--json] [--episodes 500] [--turns 40] [--model-seconds 2]

Episodes run side by side, each in turn with a conversation that grows by two messages a turn, from
clients in a process of their own. A server in the endpoint's process answers each request after
``--model-seconds``. The overhead of a request is the time that its client waited beyond that.
Memory is that of the endpoint's process without its children, in the middle and at the end, when all
episodes of the first and of the second half are over.

The exit status is 1 if a request failed, or if memory grew by more than 10 % in the second half.
With ``--json`` the last line is a JSON object.
"""

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from boundary_stall import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests/programs"))

from agent_world import EOS, make_model, playing, prompt_of

from torchtitan.grpo.rollout.agents.programs import Access
from torchtitan.grpo.rollout.environments import EnvironmentsFailing
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt, VersionSegment
from torchtitan.grpo.workers.owner import FailureLimit

ANSWER_TOKENS = 4
TIMEOUT_SECONDS = 900.0
CLIENT = """
import asyncio, json, sys, time
import aiohttp

async def episode(session, url, key, turns):
    messages, waited = [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": str(turn % 10)})
        begun = time.monotonic()
        headers = {"Authorization": "Bearer " + key}
        async with session.post(url + "/chat/completions", json={"messages": messages}, headers=headers) as answer:
            body = await answer.json()
            assert answer.status == 200, body
        waited.append(time.monotonic() - begun)
        messages.append(body["choices"][0]["message"])
    print(json.dumps({"key": key, "waited": waited}), flush=True)

async def main():
    loop, tasks = asyncio.get_running_loop(), set()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            tasks.add(asyncio.create_task(episode(session, *json.loads(line))))
        await asyncio.gather(*tasks)

asyncio.run(main())
"""


class Clients:
    """Runs the programs of all episodes in one other process, in the place of `Programs`."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self.limit = FailureLimit("", (10**9, ""), EnvironmentsFailing, print)
        self.waited: list[float] = []
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read(self._process))

    async def run(self, prompt: Prompt, access: Access) -> None:
        assert self._process is not None and self._process.stdin is not None
        ended = self._ended[access.key] = asyncio.get_running_loop().create_future()
        line = json.dumps([access.base_url, access.key, self._turns]) + "\n"
        self._process.stdin.write(line.encode())
        await ended

    async def close(self) -> None:
        assert self._process is not None and self._reading is not None
        self._reading.cancel()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            found = json.loads(line)
            self.waited += found["waited"]
            self._ended.pop(found["key"]).set_result(None)


@dataclass(frozen=True)
class Result:
    requests: int
    seconds: float
    overhead_p50_ms: float
    overhead_p99_ms: float
    memory_middle_mib: float
    memory_end_mib: float

    @property
    def ok(self) -> bool:
        return self.memory_end_mib < 1.1 * self.memory_middle_mib


async def measure(episodes: int, turns: int, model_seconds: float) -> Result:
    async def answer(request: GenerateRequest) -> Generation:
        await asyncio.sleep(model_seconds)
        ids = np.array([*[20] * (ANSWER_TOKENS - 1), EOS], np.int32)
        segments = (VersionSegment(0, 0, ANSWER_TOKENS),)
        return Generation(ids, np.full(ANSWER_TOKENS, -1.0, np.float32), "stop", segments)

    clients = Clients(turns // 2)
    memory = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(REPOSITORY, Path(folder))
        settings: dict[str, Any] = {
            "max_turns": turns, "max_concurrent_rollouts": episodes, "adaptive_concurrency": False,
        }  # fmt: skip
        async with playing(model, clients, ["1"], **settings) as (writer, dispatcher, server, _):
            server.generate = answer  # pyright: ignore[reportAttributeAccessIssue]
            begun = time.monotonic()
            for _ in range(2):
                prompt = prompt_of(server.codec)
                place = dispatcher.servers[server.url]
                tasks = [writer.start(prompt, place).task for _ in range(episodes)]
                await asyncio.gather(*tasks)
                del tasks
                gc.collect()
                memory.append(psutil.Process().memory_info().rss / 2**20)
            seconds = time.monotonic() - begun
    overhead = 1000 * (np.array(clients.waited) - model_seconds)
    return Result(
        requests=len(overhead),
        seconds=round(seconds, 1),
        overhead_p50_ms=round(float(np.percentile(overhead, 50)), 1),
        overhead_p99_ms=round(float(np.percentile(overhead, 99)), 1),
        memory_middle_mib=round(memory[0], 1),
        memory_end_mib=round(memory[1], 1),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the endpoint of agents.")
    parser.add_argument("--json", action="store_true", help="end with a JSON object")
    parser.add_argument("--episodes", type=int, default=500, help="side by side")
    parser.add_argument("--turns", type=int, default=40, help="of two episodes, in all")
    parser.add_argument("--model-seconds", type=float, default=2.0, help="for each answer")
    options = parser.parse_args(arguments)
    running = measure(options.episodes, options.turns, options.model_seconds)
    result = asyncio.run(asyncio.wait_for(running, TIMEOUT_SECONDS))
    print(
        f"{result.requests} requests of {options.episodes} episodes side by side in {result.seconds} s: "
        f"the endpoint adds {result.overhead_p50_ms} ms (median), {result.overhead_p99_ms} ms (p99); "
        f"memory {result.memory_middle_mib} MiB, then {result.memory_end_mib} MiB"
    )
    if options.json:
        print(json.dumps(vars(result) | {"ok": result.ok}))
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
