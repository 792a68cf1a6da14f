# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An agent at a real endpoint, with a server that writes what the test says."""

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from rollouts import generation
from stub_clients import StubClient
from tokenizers import Tokenizer

from torchtitan.grpo import config as tables
from torchtitan.grpo.data.rows import Sample, sequences_of
from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.rollout.agents.endpoint import AgentEndpoint
from torchtitan.grpo.rollout.agents.programs import Access, Programs
from torchtitan.grpo.rollout.agents.writer import Agents, EpisodeWriter
from torchtitan.grpo.rollout.completion_checks import rollout_problem
from torchtitan.grpo.rollout.environments import EnvironmentsFailing
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt, Rollout
from torchtitan.grpo.workers.owner import CallFailed, FailureLimit

EOS, VOCAB, ROW_LEN = 1, 128, 400
# As Qwen's, in short. What stands before the end of thinking is left out of earlier turns.
TEMPLATE = (
    "{% if tools %}T:{% for t in tools %}{{ t | tojson }}{% endfor %};{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<eos>'
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
Written = tuple[list[int], list[int], list[float]]
"""A context, the tokens that the model wrote behind it, and their logprobs."""
Program = Callable[[AsyncOpenAI, dict[str, Any], Access], Awaitable[Any]]
QUESTION = [{"role": "user", "content": "7"}]


class ScriptedServer(StubClient):
    """Writes ``answers`` in turn, and keeps each context with what it then wrote."""

    def __init__(self, codec: TextCodec, answers: list[str]) -> None:
        self.url, self.codec, self.answers = "http://a", codec, answers
        self.seen: list[Written] = []
        self.asked: list[GenerateRequest] = []
        self.held: asyncio.Event | None = None
        self.aborted: list[str] = []
        self.arrived = asyncio.Event()
        self.served = 0
        self.fails = False
        self._numbers = itertools.count()

    async def generate(self, request: GenerateRequest) -> Generation:
        answer = self.answers[next(self._numbers) % len(self.answers)]
        self.asked.append(request)
        self.arrived.set()
        if self.held is not None:
            await self.held.wait()
        if self.fails:
            raise ServerError("told to fail")
        turn = self.codec.encode_continuation(answer)[: request.max_new_tokens]
        reason = "stop" if turn[-1] == EOS else "length"
        first = len(request.prompt_ids)
        logprobs = (-np.arange(first, first + len(turn)) / 100).astype(np.float32)
        self.seen.append((list(request.prompt_ids), turn, logprobs.tolist()))
        return generation(turn, logprobs, self.served, finish_reason=reason)

    async def abort(self, request_ids: Any) -> None:
        self.aborted += request_ids


class InProcess:
    """Runs a program as a coroutine of the test."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.failed: list[CallFailed] = []
        self.limit = FailureLimit("", (100, ""), EnvironmentsFailing, self.failed.append)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, prompt: Prompt, access: Access) -> Any:
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.key) as client:
            return await self._program(client, prompt.columns, access)


@dataclass
class Played:
    """One episode, and what the server saw of it."""

    whole: Generation
    prompt: Prompt
    server: ScriptedServer
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> list[Sample]:
        return sequences_of(self.rollout)

    @property
    def rollout(self) -> Rollout:
        return rollout_of(self.whole, self.prompt)

    def texts(self) -> list[str]:
        """The rows as text, with what is trained in brackets."""
        found = []
        for row in self.rows:
            text, ids = (
                self.server.codec.decode_exactly(row.prompt_ids.tolist()),
                row.completion_ids,
            )
            flags = np.ones(len(ids), bool) if row.sampled is None else row.sampled
            for is_sampled, part in itertools.groupby(
                zip(flags, ids.tolist(), strict=True), key=lambda pair: bool(pair[0])
            ):
                piece = self.server.codec.decode_exactly([token for _, token in part])
                text += f"[{piece}]" if is_sampled else piece
            found.append(text)
        return found

    def check(self) -> None:
        """Each answer is trained once, behind exactly the context that it was written for."""
        assert rollout_problem(self.rollout, vocab_size=VOCAB, row_len=ROW_LEN) is None
        assert answers_in(self.rollout) == sorted(self.server.seen)


def rollout_of(whole: Generation, prompt: Prompt) -> Rollout:
    return Rollout(**vars(whole), prompt_ids=prompt.token_ids, completion="", reward=0.0)


def answers_in(rollout: Rollout) -> list[Written]:
    """Returns what is trained of a rollout, in sorted order."""
    found = []
    for row in sequences_of(rollout):
        ids = [*row.prompt_ids.tolist(), *row.completion_ids.tolist()]
        flags = np.zeros(len(ids), bool)
        flags[len(row.prompt_ids) :] = True if row.sampled is None else row.sampled
        ends = np.flatnonzero(np.diff(np.append(flags, False).astype(int)) == -1) + 1
        begins = np.flatnonzero(np.diff(np.append(False, flags).astype(int)) == 1)
        assert row.generator_logprobs is not None
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            own = row.generator_logprobs[begin - len(row.prompt_ids) :][: end - begin]
            found.append((ids[:begin], ids[begin:end], own.tolist()))
    return sorted(found)


@asynccontextmanager
async def playing(
    model: Path, program: Program | Programs, answers: list[str], **settings: Any
) -> AsyncIterator[tuple[EpisodeWriter, Dispatcher, ScriptedServer, Programs]]:
    """``settings`` are those of the tables ``[rollout]`` and ``[agent]``."""
    server = ScriptedServer(TextCodec(str(model), [EOS]), answers)
    programs = InProcess(program) if callable(program) else program
    async with writing(model, programs, server, **settings) as (writer, dispatcher):
        yield writer, dispatcher, server, programs


@asynccontextmanager
async def writing(
    model: Path, programs: Programs, server: InferenceClient, **settings: Any
) -> AsyncIterator[tuple[EpisodeWriter, Dispatcher]]:
    rollout = {"request_timeout_seconds": 30.0, "max_new_tokens": 100} | settings
    agent = {
        name: rollout.pop(name) for name in ("allow_sampling", "timeout_seconds") if name in rollout
    }
    config = _Config(tables.Rollout(**rollout), tables.Agent(function="a.py:run", **agent))
    codec = TextCodec(str(model), [EOS])
    dispatcher = Dispatcher([server], config.rollout, vocab_size=VOCAB)
    dispatcher.set_version(server.url, 0)
    seconds = config.agent.timeout_seconds
    agents = Agents(AgentEndpoint("127.0.0.1", ROW_LEN), programs, seconds, seconds)
    sampling = Sampling(config.rollout.max_new_tokens, ROW_LEN, 1.0, 1.0, -1, (EOS,))
    await agents.start()
    try:
        yield EpisodeWriter(dispatcher, sampling, config, codec, agents), dispatcher
    finally:
        await agents.close()
        await dispatcher.close()


async def play(model: Path, program: Program, answers: list[str], **settings: Any) -> Played:
    """Plays one episode to its end."""
    async with playing(model, program, answers, **settings) as (writer, dispatcher, server, _):
        prompt = prompt_of(server.codec)
        trajectory = writer.start(prompt, dispatcher.servers[server.url])
        assert dispatcher.in_flight == 1
        async with asyncio.timeout(60):
            whole = await trajectory.task
        assert dispatcher.in_flight == 0
        return Played(whole, prompt, server, writer.metrics())


def prompt_of(codec: TextCodec) -> Prompt:
    return Prompt(0, QUESTION, np.array(codec.encode_chat(QUESTION), np.int32), {"answer": "7"})


def make_model(
    repository: Path, folder: Path, template: str = TEMPLATE, marks: Sequence[str] = ()
) -> Path:
    """``marks`` are further special tokens."""
    model = folder / "model"
    shutil.copytree(repository / "assets/reverse_digits/model", model)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    if marks:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.add_special_tokens(list(marks))
        tokenizer.save(str(model / "tokenizer.json"))
    return model


@dataclass
class _Config:
    """The part of a rollout process's configuration that writers of agents read."""

    rollout: tables.Rollout
    agent: tables.Agent
    vocab_size: int = VOCAB
