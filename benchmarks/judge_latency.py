# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures what a judge that takes two seconds, and hangs once, costs the groups and steps of a run.

    python benchmarks/judge_latency.py [--json] [--rounds 3]

The judge never answers requests about the first prompt that it sees. 64 groups of 4 completions are
scored by workers that have been started before, until all groups but one have their scores. Then two
runs with the quickstart's 16 groups of 8 completions a step learn from a judge that answers about all
prompts, and from one that hangs. It takes about five minutes. The exit status is 1 if,
with as many places as requests, the groups take over a second longer than the judge.
"""

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from aiohttp import web
from boundary_stall import REPOSITORY
from figures import finish, make_parser

sys.path.insert(0, str(REPOSITORY / "tests/programs"))

from stub_clients import serving

from torchtitan.grpo import run
from torchtitan.grpo.config import Judge, Reward
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rewards.scoring_worker import Scored
from torchtitan.grpo.types import Prompt

JUDGE_SECONDS = 2.0
NUM_GROUPS, GROUP_SIZE = 64, 4
PLACES = 256
WIDE = f"1 worker, {PLACES} places"
SETTINGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "4 workers": (4, {}, {}),
    "1 worker": (1, {}, {}),
    WIDE: (1, {}, {"max_concurrent": PLACES}),
    "4 workers, one at a time": (4, {"concurrency": 1}, {}),
}


@contextmanager
def stub_judge(
    hangs: bool, seconds: float = JUDGE_SECONDS, **settings: Any
) -> Iterator[dict[str, Any]]:
    """Runs the judge in a thread of its own, and yields the table [reward.judge]."""
    hanging: list[str] = []
    ready, end = queue.SimpleQueue[tuple[str, asyncio.AbstractEventLoop]](), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        prompt, _, completion = text.partition("|")
        if hangs and completion and not hanging:
            hanging.append(prompt)
        await asyncio.sleep(1e6 if prompt in hanging else seconds)
        return web.json_response({"choices": [{"message": {"content": str(len(text) % 10)}}]})

    async def serve() -> None:
        async with serving(answer) as url:
            ready.put((url, asyncio.get_running_loop()))
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="judge")
    thread.start()
    url, loop = ready.get(timeout=60)
    try:
        yield {"url": url, "model": "stub", "template": "{prompt}|{completion}", **settings}
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(60)


async def score_groups(num_workers: int, reward: Reward) -> float:
    """Returns the seconds until all groups but one are scored."""
    pool = RewardPool(["judge"], reward, num_workers=num_workers)
    prompts = [Prompt(i, str(i), np.array([1], np.int32), {}) for i in range(NUM_GROUPS)]
    completions, ids = list("abcdefgh"[:GROUP_SIZE]), [[1]] * GROUP_SIZE
    tasks: list[asyncio.Task[Scored]] = []
    try:
        await pool.start()
        # As many groups at a time as there are workers start all of them.
        await asyncio.gather(*map(pool.check, prompts[:num_workers]))
        begun = time.monotonic()
        tasks += [asyncio.create_task(pool.score(p, completions, ids)) for p in prompts]
        for scored in islice(asyncio.as_completed(tasks), NUM_GROUPS - 1):
            await scored
        return time.monotonic() - begun
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.close()


def group_seconds(num_workers: int, reward: dict[str, Any], judge: dict[str, Any]) -> float:
    with stub_judge(hangs=True, **judge) as table:
        settings = Reward(judge=Judge(**table), **reward)
        return round(asyncio.run(score_groups(num_workers, settings)), 2)


def step_seconds(*, hangs: bool) -> list[float]:
    with stub_judge(hangs=hangs, max_concurrent=PLACES) as table, TemporaryDirectory() as folder:
        training = run(
            str(REPOSITORY / "train_configs/quickstart.toml"),
            reward={"functions": ["judge"], "judge": table},
            ranks=1,
            quiet=True,
            job={"dump_folder": folder, "overwrite": True},
            training={"steps": 12},
            evaluation={"num_prompts": 8},
        )
        return [step["time/step_seconds"] for step in training]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for name, settings in SETTINGS.items():
        found = sorted(group_seconds(*settings) for _ in range(options.rounds))
        figures |= {f"{name}/seconds": median(found), f"{name}/longest": found[-1]}
        print(f"{name}: {median(found)} s (from {found[0]} to {found[-1]})", flush=True)
    for name, hangs in {"all answered": False, "one hangs": True}.items():
        found = [round(seconds, 2) for seconds in step_seconds(hangs=hangs)]
        figures |= {f"{name}/step_seconds": median(found), f"{name}/longest_step": max(found)}
        print(f"{name}: a step takes {median(found)} s, {found}", flush=True)
    ok = figures[f"{WIDE}/longest"] <= JUDGE_SECONDS + 1
    return finish(options, "judge_latency", ok, figures)


if __name__ == "__main__":
    sys.exit(main())
