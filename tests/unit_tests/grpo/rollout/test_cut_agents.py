# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A program does not notice that the server is cut while it writes an answer."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agent_world import (
    EOS,
    InProcess,
    ScriptedServer,
    answers_in,
    make_model,
    prompt_of,
    rollout_of,
    writing,
)

from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import GenerateRequest, Generation


class InterruptedServer(ScriptedServer):
    """Has written one token of its first answer when it is aborted."""

    is_cut = False

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.is_cut:
            return await super().generate(request)
        self.held = asyncio.Event()
        part = await super().generate(request)
        self.held, self.is_cut = None, True
        return Generation(part.token_ids, part.logprobs, "abort", part.segments)

    async def abort(self, request_id: Any) -> None:
        assert request_id is None and self.held is not None
        self.held.set()


@pytest.mark.parametrize("settings", [{}, {"stop": ["4"]}])
async def test_an_answer_goes_on_behind_the_tokens_that_it_had(
    repository: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    texts = []

    async def program(client: Any, row: Any, access: Any) -> None:
        messages: Any = [{"role": "user", "content": "7"}]
        answer = await client.chat.completions.create(model="m", messages=messages, **settings)
        texts.append(answer.choices[0].message.content)

    model = make_model(repository, tmp_path)
    server = InterruptedServer(TextCodec(str(model), [EOS]), ["1", "234<eos>"])
    async with writing(model, InProcess(program), server) as (writer, dispatcher):
        prompt = prompt_of(server.codec)
        trajectory = writer.start(prompt, dispatcher.servers[server.url])
        await server.arrived.wait()
        assert await dispatcher.cut(server.url) == 1
        server.served = 1
        dispatcher.admit(server.url)
        dispatcher.set_version(server.url, 1)
        whole = await trajectory.task
        assert dispatcher.attempts.num_failed == 0
    assert texts == ["123" if settings else "1234"]
    assert [segment.version for segment in whole.segments] == [0, 1]
    (answer,) = answers_in(rollout_of(whole, prompt))
    first, second = server.seen
    end = 4 if settings else 5  # what stands behind the stop string is not trained
    tokens, logprobs = first[1] + second[1], first[2] + second[2]
    assert answer == (first[0], tokens[:end], pytest.approx(logprobs[:end]))
