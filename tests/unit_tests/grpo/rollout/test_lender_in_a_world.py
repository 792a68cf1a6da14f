# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Devices are lent and taken back at random, by servers that hang, refuse and end at random."""

import asyncio
import random
import time
from contextlib import suppress
from selectors import DefaultSelector
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import generation, group, rollout
from stub_clients import StubClient

from torchtitan.grpo.config import GRPO, Rollout
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.lending.lender import DeviceRequests, Lender
from torchtitan.grpo.rollout.lending.scheduler import Decision, LendScheduler, Lent, Moment
from torchtitan.grpo.rollout.link_messages import DevicesWanted
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt

NUM_BATCHES, SLEEP_SECONDS, NOTICE_SECONDS, LOOK_SECONDS = 5, 3.0, 0.2, 0.1
SAMPLING = Sampling(8, 10, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(1,))
HANGS = 1e6


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time passes only while nothing is left to do, and then at once."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = DefaultSelector()
        select = selector.select

        def pass_time(timeout: float | None = None) -> Any:
            assert timeout is not None, "everything waits for ever"
            self._now += timeout
            return select(0)

        selector.select = pass_time  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(selector)

    def time(self) -> float:
        return self._now


class Server(StubClient):
    """Takes long for a completion, and answers with a part when it is aborted."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self.url, self._rng = url, rng
        self.running: set[asyncio.Future[None]] = set()
        self.num_aborts = 0
        self.version = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        aborted, version = asyncio.get_running_loop().create_future(), self.version
        self.running.add(aborted)
        try:
            await asyncio.wait({aborted}, timeout=self._rng.uniform(0.1, 4))
        finally:
            self.running.discard(aborted)
        return generation(2, version=version, finish_reason="abort" if aborted.done() else "stop")

    async def abort(self, request_id: str | None) -> None:
        self.num_aborts += 1
        for one in self.running:
            one.set_result(None)
        if self._rng.random() < 0.2:
            raise ServerError("a lost connection")


class Unsteady(LendScheduler):
    """Decides at random, within what a scheduler promises."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(0.05)
        self._rng = rng
        self.last: Moment | None = None
        self.lent_at = self.taken_back_at = 0.0

    def decide(self, moment: Moment) -> Decision:
        self.last, is_lent = moment, moment.lent in (Lent.WAKING, Lent.AWAKE)
        changes = self._rng.random() < 0.2
        if is_lent and (moment.is_full or changes):
            self.taken_back_at = moment.now
            return Decision.TAKE_BACK
        can_lend = moment.lent is Lent.NO and not moment.is_full
        if not (can_lend and changes):
            return Decision.STAY
        self.lent_at = moment.now
        return Decision.LEND


class World:
    """Rank 0, its lanes, and the launched servers. ``using`` are lent servers with device memory."""

    def __init__(self, seed: int, num_lent: int, num_others: int) -> None:
        self.rng = random.Random(seed)
        self.clients = [Server(f"http://lent{i}", self.rng) for i in range(num_lent)]
        self.others = [Server(f"http://other{i}", self.rng) for i in range(num_others)]
        self.lent = [client.url for client in self.clients]
        self.using, self.down, self.refused = set(self.lent), set[str](), dict[str, float]()
        self.has_room, self.version, self.waits, self.was_lost = True, 0, False, False
        self.freed_at = self.room_at = self.told_at = 0.0
        self.totals = dict.fromkeys(("wakes", "kills", "cut_requests"), 0)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        config = Rollout(max_concurrent_rollouts=8)
        self.dispatcher = Dispatcher([*self.clients, *self.others], config, vocab_size=100)
        self.devices = DeviceRequests(self.make_room, 0)
        self.scheduler = Unsteady(self.rng)
        self.lender = Lender(
            self.scheduler, Admission(GRPO(prompts_per_step=2), config, 0), self.dispatcher, self,
            self.devices, set, sleep_seconds=SLEEP_SECONDS, clock=self.now,
        )  # fmt: skip

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def pause(self, longest: float) -> None:
        await asyncio.sleep(self.rng.uniform(0, longest))

    # What the lender asks for.

    async def make_room(self, wanted: DevicesWanted) -> None:
        assert self.waits and wanted.version == self.version
        self.tasks["room"] = asyncio.create_task(self._make_room(wanted.version))

    async def _make_room(self, version: int) -> None:
        await self.pause(1)
        self.has_room = self.has_room or (self.waits and version == self.version)
        self.room_at = self.now()
        self.devices.free(version)  # late, if the batch has overtaken it

    async def set_wanted(self, is_wanted: bool) -> None:
        self.totals["wakes"] += is_wanted
        if is_wanted and self.room_at > self.scheduler.lent_at:
            assert self.now() == self.room_at, "no news is waited for"
        self.refused.clear()
        self.told_at = self.now()
        for client in self.clients:
            self.start(client, self.wake if is_wanted else self.sleep)

    def start(self, client: Server, work: Any) -> None:
        if client.url in self.tasks:
            self.tasks[client.url].cancel()
        self.tasks[client.url] = asyncio.create_task(work(client))

    async def wake(self, client: Server) -> None:
        assert self.has_room, "woken while the ranks use their devices"
        if client.url in self.down:
            await asyncio.sleep(2 * NOTICE_SECONDS)
            self.dispatcher.set_running(client.url)
            self.down.discard(client.url)
        self.using.add(client.url)
        await self.pause(2)
        client.version = self.version
        self.dispatcher.set_version(client.url, self.version)
        if self.rng.random() < 0.2:
            await self.pause(3)
            self.was_lost = True
            self.dispatcher.set_lost(client.url, "a lost connection")
            self.lender.note_lost(client.url, "a lost connection")
            await self.pause(1)
            self.dispatcher.set_version(client.url, self.version)

    async def sleep(self, client: Server) -> None:
        assert not client.running, "put to sleep before it is cut"
        if client.url in self.down:
            return
        how = self.rng.choices(["sleeps", "refuses", "hangs"], [8, 1, 1])[0]
        await (asyncio.sleep(HANGS) if how == "hangs" else self.pause(1))
        if how == "sleeps":
            self.free(client.url)
            self.lender.note_asleep(client.url)
        else:
            self.refused[client.url] = self.now()
            self.dispatcher.set_lost(client.url, "it does not sleep")
            self.lender.note_lost(client.url, "it does not sleep")

    def free(self, url: str) -> None:
        self.using.discard(url)
        self.freed_at = self.now()

    def is_up(self, url: str) -> bool:
        return url not in self.down

    async def end(self, url: str) -> bool:
        self.totals["kills"] += 1
        assert url in self.using, "ended once, and not a server that sleeps"
        due = self.refused.get(url, self.told_at + SLEEP_SECONDS)
        assert 0 <= self.now() - due <= (0 if url in self.refused else 2 * LOOK_SECONDS)
        await self.kill(url)
        return True

    async def kill(self, url: str) -> None:
        self.tasks[url].cancel()
        self.down.add(url)
        self.free(url)
        asyncio.get_running_loop().call_later(NOTICE_SECONDS, self.notice_end, url)

    def notice_end(self, url: str) -> None:
        self.freed_at = self.now()
        self.dispatcher.set_down(url, "its process has ended")

    # What happens.

    async def generate(self, group_id: int) -> None:
        prompt = Prompt(group_id, "abc", np.arange(3, dtype=np.int32), {})
        while True:
            while (server := self.dispatcher.choose(lambda version: True)) is None:
                await asyncio.sleep(0.3)
            await self.dispatcher.submit(prompt, server, SAMPLING)

    async def train(self) -> None:
        for self.version in range(NUM_BATCHES):
            self.waits, asked_at = True, self.now()
            self.lender.ask(self.version)
            await self.pause(8)
            full_at = self.now()
            assert self.scheduler.last is not None and self.scheduler.last.asked_at == asked_at
            metrics = await self.lender.give_back([group(0, rollout(4))])
            assert not self.using, "a batch is sent when no lent server has memory"
            assert self.now() - max(full_at, self.freed_at) < 1e-6, "no news is waited for"
            assert metrics["lend/late_seconds"] == self.now() - full_at
            self.waits = self.has_room = False
            self.totals["cut_requests"] += self.dispatcher.num_cut
            for name, total in self.totals.items():
                assert metrics[f"lend/{name}"] == total
                self.totals[name] = 0
            self.totals["cut_requests"] -= self.dispatcher.num_cut
            await self.pause(3)
        self.has_room = True
        self.room_at = self.now()
        self.devices.free(NUM_BATCHES)  # after the last step
        while self.lender.lent is not Lent.AWAKE:
            await asyncio.sleep(0.1)

    async def run(self) -> None:
        for client in self.clients:
            self.start(client, self.wake)
        for other in self.others:
            self.dispatcher.set_version(other.url, 0)
        self.devices.free(0)
        beside = [asyncio.create_task(self.lender.run())]
        beside += [asyncio.create_task(self.generate(i)) for i in range(4)]
        training = asyncio.create_task(asyncio.wait_for(self.train(), 500))
        await asyncio.wait({training, *beside}, return_when=asyncio.FIRST_COMPLETED)
        for task in (training, *beside, *self.tasks.values()):
            if task.done() and not task.cancelled():
                task.result()
        assert training.done()
        assert not any(other.num_aborts for other in self.others)
        num_failed = self.dispatcher.attempts.num_failed
        assert num_failed == 0 or self.was_lost, "cut requests keep their tokens"
        for task in (*beside, *self.tasks.values()):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 2), st.integers(0, 1))
def test_a_batch_is_sent_while_no_lent_server_is_awake_and_each_loan_ends(
    seed: int, num_lent: int, num_others: int
):
    runner = asyncio.Runner(loop_factory=VirtualLoop)
    with runner, mock.patch.object(time, "monotonic", runner.get_loop().time):
        runner.run(live(seed, num_lent, num_others))


async def live(seed: int, num_lent: int, num_others: int) -> None:
    await World(seed, num_lent, num_others).run()
