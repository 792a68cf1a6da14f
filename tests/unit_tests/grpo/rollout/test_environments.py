# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Completions of several turns: real worker processes, a server that reads its whole context."""

import asyncio
import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from processes import descendants
from stub_clients import StubClient

from torchtitan.grpo.config import Agent, Rollout, Workers
from torchtitan.grpo.rollout.agents.writer import EpisodeWriter
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments import (
    EnvironmentFailed,
    EnvironmentsFailing,
)
from torchtitan.grpo.rollout.environments.program import Environments
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.trajectory import RunningGroup, Trajectory
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt, VersionSegment

EOS = 1

MINE = '''
import asyncio, os, time
from torchtitan.grpo.rollout.environments import Environment, Observation

OBSERVED = {
    "half a text": Observation(text="\\ud83d"),
    "huge": Observation(text="9" * 1000),
    "nothing": Observation(),
    "not one": "text",
    "no such token": Observation(token_ids=[4000]),
    "negative token": Observation(token_ids=[-1]),
    "nan": Observation(text="1", reward=float("nan")),
    "too large": Observation(text="1", reward=-1e13),
    "sum too large": Observation(text="1", reward=1e12),
}

class Echo(Environment):
    """Answers each turn with how many it has read; done at the third. The prompt says more."""
    stop_strings = ("=",)

    def __init__(self, rounds=3):
        self.rounds, self.texts = rounds, []

    async def reset(self, prompt):
        self.prompt = prompt
        if "reset" in prompt.text:
            raise RuntimeError("cannot begin")

    async def step(self, text, token_ids):
        self.texts.append(text)
        what = self.prompt.columns.get("what", "")
        first_here = not os.path.exists(self.prompt.columns.get("flag", "/"))
        if len(self.texts) == 2:
            if what == "raise":
                raise KeyError("no such thing")
            if what == "service":
                raise ConnectionResetError
            if what == "surrogate":
                print("\\ud83d")
                raise ValueError("\\ud83d")
            if what == "block":
                time.sleep(1000)
            if what == "hang":
                await asyncio.sleep(1000)
            if what == "crash" or (what == "crash once" and first_here):
                open(self.prompt.columns["flag"], "w").close()
                os._exit(3)
            if what in OBSERVED:
                return OBSERVED[what]
        if len(self.texts) >= self.rounds:
            return Observation(text="never seen", is_done=True, reward=2.0)
        return Observation(text=f"[{len(self.texts)}:{text.rstrip('=')}]", reward=0.5)

    async def cut_off(self):
        return 0.25

    async def close(self):
        if "closed" in self.prompt.columns:
            open(self.prompt.columns["closed"], "w").close()
'''


class Server(StubClient):
    """Writes scripted turns: which one, it reads off the stop tokens of its context."""

    def __init__(self, codec: TextCodec, turns: list[str]) -> None:
        self.url = "http://a"
        self.codec = codec
        self.turns = [codec.encode(turn.removesuffix("$")) for turn in turns]
        for turn, ids in zip(turns, self.turns, strict=True):
            if turn.endswith("$"):
                ids.append(EOS)
        self.contexts: list[list[int]] = []
        self.held: asyncio.Event | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        self.contexts.append(list(request.prompt_ids))
        await asyncio.sleep(0)
        if self.held is not None:
            await self.held.wait()
        stop = self.codec.encode("=")[0]
        assert set(request.stop_token_ids) == {EOS, stop}
        ids = request.prompt_ids
        number = ids.count(stop)
        done = 0  # of that turn, where it was cut at the end of a segment
        turn = self.turns[number]
        for length in range(len(turn) - 1, 0, -1):
            if ids[-length:] == turn[:length]:
                done = length
                break
        tokens = turn[done : done + request.max_new_tokens]
        positions = np.arange(len(tokens)) + len(request.prompt_ids)
        return Generation(
            np.array(tokens, np.int32),
            (-positions / 100).astype(np.float32),
            "stop" if tokens[-1] in request.stop_token_ids else "length",
            (VersionSegment(4, 0, len(tokens)),),
        )


@dataclass
class World:
    """A writer with its environments."""

    writer: EpisodeWriter
    environments: Environments
    dispatcher: Dispatcher
    server: Server
    codec: TextCodec

    def start(
        self, text: str = "7->", begun: Generation | None = None, **columns: Any
    ) -> Trajectory:
        server = self.dispatcher.choose(lambda version: True)
        assert server is not None
        ids = np.array(self.codec.encode(text), np.int32)
        return self.writer.start(Prompt(0, text, ids, columns), server, begun=begun)

    async def write(self, text: str = "7->", **columns: Any) -> Generation:
        return await self.start(text, **columns).task

    def metric(self, name: str) -> float:
        return self.writer.metrics()[f"environment/{name}"]


@pytest.fixture
def codec(repository: Path) -> TextCodec:
    return TextCodec(str(repository / "assets/reverse_digits/model"), [EOS])


@pytest.fixture
def open_world(codec: TextCodec, tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)

    @contextlib.asynccontextmanager
    async def open_(
        turns: list[str], *, max_new_tokens: int = 60, **settings: Any
    ) -> AsyncIterator[World]:
        before = set(psutil.Process().children(recursive=True))
        defaults = {"environment": f"{tmp_path / 'mine.py'}:Echo", "max_turns": 8}
        rollout = Rollout(request_timeout_seconds=30, **defaults | settings)
        config: Any = SimpleNamespace(
            rollout=rollout, agent=Agent(), workers=Workers(), vocab_size=128
        )
        environments = Environments(config, DropLog())
        try:
            await environments.start()
            stop_ids = (EOS, *(codec.encode(text)[0] for text in environments.stop_strings))
            server = Server(codec, turns)
            dispatcher = Dispatcher([server], rollout, vocab_size=128)
            dispatcher.set_version(server.url, 4)
            sampling = Sampling(max_new_tokens, 400, 1.0, 1.0, -1, stop_ids)
            writer = EpisodeWriter(dispatcher, sampling, config, codec, environments)
            yield World(writer, environments, dispatcher, server, codec)
            assert dispatcher.in_flight == 0
        finally:
            await environments.close()
        left = set(psutil.Process().children(recursive=True)) - before
        assert not psutil.wait_procs(left, timeout=5)[1]

    return open_


TURNS = ["12=", "3=", "45$"]
WHOLE = "12=[1:12]3=[2:3]45"


def spell(world: World, generation: Generation) -> str:
    return world.codec.decode(generation.token_ids.tolist())


@pytest.mark.parametrize("segment_tokens", [0, 1, 2])
async def test_turns_and_observations_make_up_one_completion_token_by_token(
    open_world, segment_tokens
):
    async with open_world(TURNS, segment_tokens=segment_tokens) as world:
        whole = await world.write()
        assert spell(world, whole) == WHOLE
        assert (whole.finish_reason, whole.environment_reward) == ("stop", 3.0)
        assert whole.segments == (VersionSegment(4, 0, len(whole.token_ids)),)
        # Every context is the prompt and a beginning of the completion, exactly.
        expected = [*world.codec.encode("7->"), *whole.token_ids.tolist()]
        for context in world.server.contexts:
            assert context == expected[: len(context)]
        if segment_tokens == 0:
            assert [len(c) - 3 for c in world.server.contexts] == [0, 9, 16]
        assert whole.sampled is not None
        spelled = np.array(list(WHOLE + "$"))
        assert "".join(spelled[whole.sampled]) == "12=3=45$"
        # The server's logprob where the model wrote, and none elsewhere.
        positions = 3 + np.arange(len(whole.token_ids))
        given = np.where(whole.sampled, -positions / 100, 0.0)
        np.testing.assert_allclose(whole.logprobs, given, rtol=1e-6)


async def test_an_episode_ends_with_max_turns_and_with_the_room(open_world):
    cut, reward = "12=[1:12]3=", 0.5 + 0.5 + 0.25
    for settings, columns, text, earned in (
        ({"max_turns": 2}, {}, cut, reward),
        # What nothing could be written after is left out.
        ({}, {"what": "huge"}, cut, reward - 0.5),
        ({"max_new_tokens": 17}, {}, "12=[1:12]3=[2:3]4", 3.0),
    ):
        async with open_world(TURNS, **settings) as world:
            whole = await world.write(**columns)
            assert spell(world, whole) == text
            assert (whole.finish_reason, whole.environment_reward) == ("length", earned)


async def test_an_environment_that_fails_fails_its_own_completion(open_world, tmp_path):
    kinds = {
        "raise": "raised KeyError", "surrogate": "raised ValueError", 2**70: "column",
        "half a text": "bad observation", "not one": "bad observation",
        "no such token": "bad observation", "negative token": "bad observation",
        "nan": "bad observation", "crash": "crash",
        "too large": "bad reward", "sum too large": "bad reward", "service": "outside: ConnectionResetError",
    }  # fmt: skip
    async with open_world(TURNS) as world:
        for number, (what, kind) in enumerate(kinds.items(), start=1):
            bad = world.start(what=what, flag=str(tmp_path / "flag"))
            with pytest.raises(EnvironmentFailed) as caught:
                await bad.task
            assert caught.value.kind == kind
            if what == "raise":
                assert re.search(r"KeyError.*\(at .*\.py:\d+, in \w+: ", str(caught.value))
            assert bad.result() is None
            assert RunningGroup(bad.prompt, [bad], ()).failures() == [caught.value]
            written = caught.value.written
            assert (written is None) == (
                kind in ("column", "crash", "outside: ConnectionResetError")
            )
            # What was read so far, and the turn at which the environment failed, without its rewards.
            assert written is None or spell(world, written) == "12=[1:12]3="
            assert written is None or written.environment_reward is None
            assert spell(world, await world.write()) == WHOLE
            assert world.metric("failed_episodes") == number
        assert world.environments.limit.failures == Counter(kinds.values())
        # The model goes on where an environment says nothing, and one may crash once.
        assert spell(world, await world.write(what="nothing")) == "12=[1:12]3=45"
        replayed = world.metric("replayed_turns")
        whole = await world.write(what="crash once", flag=str(tmp_path / "another flag"))
        assert spell(world, whole) == WHOLE
        assert world.metric("replayed_turns") == replayed + 2
        assert world.metric("failed_episodes") == len(kinds)


@pytest.mark.parametrize("what", ["block", "hang"])
async def test_a_step_that_hangs_holds_up_neither_the_loop_nor_other_episodes(open_world, what):
    async with open_world(TURNS, environment_timeout_seconds=5.0) as world:
        blocked = world.start(what=what)
        while len(world.server.contexts) < 2:
            await asyncio.sleep(0.01)
        (process,) = descendants("agents.function_worker")
        others = await asyncio.gather(*(world.write() for _ in range(8)))
        assert [spell(world, other) for other in others] == [WHOLE] * 8
        assert not blocked.task.done()
        assert world.metric("replayed_turns") == 0
        # Its process takes nobody in any more, and ends when it is alone.
        with pytest.raises(EnvironmentFailed, match=r"environment_timeout_seconds = 5\."):
            await blocked.task
        assert not (await asyncio.to_thread(psutil.wait_procs, [process], 10))[1]
        assert spell(world, await world.write()) == WHOLE


async def test_episodes_of_a_killed_process_are_replayed_in_another(open_world):
    async with open_world(TURNS) as world:
        trajectories = [world.start() for _ in range(4)]
        while not all(t.so_far is not None and t.so_far.sampled is not None for t in trajectories):
            await asyncio.sleep(0)
        world.server.held = asyncio.Event()
        for process in descendants("agents.function_worker"):
            os.kill(process.pid, signal.SIGKILL)
        world.server.held.set()
        wholes = await asyncio.gather(*(t.task for t in trajectories))
        assert [spell(world, whole) for whole in wholes] == [WHOLE] * 4
        # Rewards of turns that were read twice count once.
        assert [whole.environment_reward for whole in wholes] == [3.0] * 4
        assert not world.environments.limit.failures


async def test_a_saved_completion_continues_from_wherever_it_was(open_world):
    """3 and 11: a turn has ended, and was not observed; 9: it was; 2 and 10: amid a turn."""
    async with open_world(TURNS) as world:
        whole = await world.write()
        for num_tokens in (2, 3, 9, 10, 11):
            sampled = whole.sampled[:num_tokens]
            begun = Generation(
                whole.token_ids[:num_tokens],
                whole.logprobs[:num_tokens],
                "stop" if num_tokens in (3, 11) else "length",
                (VersionSegment(4, 0, num_tokens),),
                None if sampled.all() else sampled,
                None if num_tokens < 9 else 0.5,
            )
            world.server.contexts.clear()
            resumed = await world.start(begun=begun).task
            assert resumed.token_ids.tolist() == whole.token_ids.tolist()
            np.testing.assert_array_equal(resumed.sampled, whole.sampled)
            np.testing.assert_allclose(resumed.logprobs, whole.logprobs, rtol=1e-6)
            assert (resumed.finish_reason, resumed.environment_reward) == ("stop", 3.0)
            assert min(len(context) - 3 for context in world.server.contexts) >= num_tokens


async def test_a_completion_goes_on_from_where_its_environment_makes_another_observation(
    open_world, codec
):
    ids = np.array(codec.encode("12=[1:99]45"), np.int32)
    sampled = np.array([c not in "[1:99]" for c in "12=[1:99]45"])
    sampled[:3] = True
    begun = Generation(
        ids, np.zeros(len(ids), np.float32), "length", (VersionSegment(2, 0, len(ids)),), sampled
    )
    async with open_world(TURNS) as world:
        whole = await world.start(begun=begun).task
        assert spell(world, whole) == WHOLE
        # The first turn is that of before; what was shown belongs to the version of what it follows.
        assert whole.segments == (VersionSegment(2, 0, 9), VersionSegment(4, 9, len(WHOLE) + 1))
        assert world.metric("restarted_completions") == 1


async def test_a_completion_that_is_given_up_has_its_environment_closed(open_world, tmp_path):
    async with open_world(TURNS) as world:
        world.server.held = asyncio.Event()
        trajectory = world.start(closed=str(tmp_path / "closed"))
        await asyncio.sleep(0)
        while not world.server.contexts:
            await asyncio.sleep(0)
        trajectory.task.cancel()
        await asyncio.wait({trajectory.task})
        while not (tmp_path / "closed").exists():
            await asyncio.sleep(0.01)


async def test_environments_that_always_fail_stop_the_run(open_world):
    async with open_world(TURNS, max_consecutive_failures=3) as world:
        for _ in range(2):
            with pytest.raises(EnvironmentFailed, match="cannot begin"):
                await world.write("reset")
        with pytest.raises(EnvironmentsFailing, match=r"3 episodes .* in a row failed"):
            await world.write("reset")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": "no_such_module:Thing"}, "importing no_such_module failed"),
        ({"environment": "collections:OrderedDict"}, "async methods reset, step and close"),
        ({"environment_options": {"colour": 1}}, "does not take rollout.environment_options"),
    ],
)
async def test_an_object_that_is_not_an_environment_is_refused_at_the_start(
    open_world, settings, message
):
    with pytest.raises(EnvironmentsFailing, match=message):
        async with open_world(TURNS, **settings):
            pytest.fail("it was started")


PLAYED = [
    (["x=", "12*34=", "$"], "12*34->", "408", {}, ("x=12*34=408", "stop", 1.0)),
    (["1+*=", "9$"], "1+1->", 2, {}, ("1+*=error9", "stop", 0.0)),
    (["3*4=", "."], "3*4->", [12, "x"], {"max_new_tokens": 9}, ("3*4=12...", "length", 1.0)),
    (["(2+3)*4=", "9=", "1="], "5->", 1, {"max_turns": 3}, ("(2+3)*4=209=91=", "length", 0.0)),
    (["12*3=", "45$"], "5->", None, {"max_new_tokens": 8}, ("12*3=364", "length", None)),
]


@pytest.mark.parametrize(("turns", "text", "answer", "settings", "expected"), PLAYED)
async def test_the_calculator_answers_rewards_and_takes_errors_as_they_come(
    open_world, turns, text, answer, settings, expected
):
    columns = {} if answer is None else {"answer": answer}
    async with open_world(turns, environment="calculator", **settings) as world:
        whole = await world.write(text, **columns)
        assert (spell(world, whole), whole.finish_reason, whole.environment_reward) == expected


def test_special_tokens_in_what_a_tool_answers_are_plain_text(codec: TextCodec):
    plain = codec.encode_observation("<eos>", has_special_tokens=False)
    assert EOS not in plain and len(plain) == 5
    assert codec.encode_observation("1<eos>", has_special_tokens=True)[-1] == EOS
    assert codec.encode("<eos>") == [EOS]
