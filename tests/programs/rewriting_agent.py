# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An agent that treats its conversation as the column `kind` of its row says.

It appends what it was sent to the file in the column `log`, one line for each episode.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import httpx
from openai import AsyncOpenAI

Messages = list[dict[str, Any]]
MORE = {"role": "user", "content": "8"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "sub")
]
# Whatever is written, there is nothing before it.
ANYTHING = [chr(code) for code in range(ord(" "), ord("~") + 1)]


class Line(httpx.AsyncHTTPTransport):
    """Keeps the answers that arrive. If it ``loses_first``, the client never sees the first one."""

    def __init__(self, *, loses_first: bool) -> None:
        super().__init__(verify=False)
        self._loses_first = loses_first
        self.arrived: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        self.arrived.append(json.loads(await response.aread()))
        if self._loses_first:
            self._loses_first = False
            raise httpx.ReadError("told to lose it", request=request)
        return response


class Talk:
    """A client, and the row's question."""

    def __init__(self, client: AsyncOpenAI, question: Messages) -> None:
        self._client, self.question = client, question

    async def ask(self, messages: Messages, *, continues: bool = False, **settings: Any) -> str:
        """Asks once; the messages then have the answer as well."""
        more = {"return_token_ids": True}
        if continues:
            more |= {"continue_final_message": True, "add_generation_prompt": False}
        answer = await self._client.chat.completions.create(
            model="policy", messages=messages, logprobs=True, extra_body=more, **settings
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        return message.content or ""

    async def first(self, *before: dict[str, Any], **settings: Any) -> tuple[Messages, str]:
        messages = [*before, *self.question]
        return messages, await self.ask(messages, **settings)


async def summary(talk: Talk) -> None:
    _, text = await talk.first()
    await talk.ask([{"role": "user", "content": f"In short: {text}"}])


async def dropped_middle(talk: Talk) -> None:
    messages, _ = await talk.first()
    await talk.ask([messages[0], MORE])


async def edited_system_prompt(talk: Talk) -> None:
    messages, _ = await talk.first({"role": "system", "content": "5"})
    await talk.ask([{"role": "system", "content": "6"}, *messages[1:], MORE])


async def reordered_tools(talk: Talk) -> None:
    messages, _ = await talk.first(tools=TOOLS)
    await talk.ask([*messages, MORE], tools=TOOLS[::-1])


async def two_branches(talk: Talk) -> None:
    messages, _ = await talk.first()
    await talk.ask([*messages, {"role": "user", "content": "7"}])
    await talk.ask([*messages, MORE])


async def sub_agent(talk: Talk) -> None:
    messages, _ = await talk.first()
    inner, _ = await talk.first({"role": "system", "content": "5"})
    await talk.ask([*inner, MORE])
    await talk.ask([*messages, MORE])


async def asked_once(talk: Talk) -> None:
    await talk.first()


async def regenerated_answer(talk: Talk) -> None:
    await talk.first()
    await talk.first()


async def parallel_requests(talk: Talk) -> None:
    await asyncio.gather(talk.first(), talk.first(), talk.ask([MORE]))


async def prefix(talk: Talk) -> None:
    messages, text = await talk.first()
    beginning = {"role": "assistant", "content": text[: len(text) // 2]}
    await talk.ask([messages[0], beginning], continues=True)


async def empty_answer(talk: Talk) -> None:
    messages, text = await talk.first(stop=ANYTHING)
    assert text == "", text
    await talk.ask([*messages, MORE])


async def truncated_answer(talk: Talk) -> None:
    messages, _ = await talk.first(max_tokens=2)
    await talk.ask([*messages, MORE])


class Kind(NamedTuple):
    """A program, and what one of its episodes must count."""

    run: Callable[[Talk], Awaitable[None]]
    rows: int
    conversations: int
    requests: int


KINDS = {
    "summary": Kind(summary, 2, 2, 2),
    "dropped middle": Kind(dropped_middle, 2, 2, 2),
    "edited system prompt": Kind(edited_system_prompt, 2, 2, 2),
    "reordered tools": Kind(reordered_tools, 2, 2, 2),
    "two branches": Kind(two_branches, 2, 1, 3),
    "sub-agent": Kind(sub_agent, 2, 2, 4),
    "retried request": Kind(asked_once, 2, 1, 2),
    "regenerated answer": Kind(regenerated_answer, 2, 1, 2),
    "parallel requests": Kind(parallel_requests, 3, 2, 3),
    "prefix": Kind(prefix, 2, 2, 2),
    "empty answer": Kind(empty_answer, 1, 1, 2),
    "truncated answer": Kind(truncated_answer, 1, 1, 2),
}


async def run(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Returns the share of digits in what the model wrote."""
    line = Line(loses_first=row["kind"] == "retried request")
    async with httpx.AsyncClient(transport=line, timeout=60.0) as http:
        question = [{"role": "user", "content": row["question"]}]
        await KINDS[row["kind"]].run(Talk(client.with_options(http_client=http), question))
    answers = [(body["prompt_token_ids"], body["choices"][0]) for body in line.arrived]
    sent = [(ids, choice["token_ids"], _logprobs(choice)) for ids, choice in answers]
    with open(row["log"], "a") as file:
        file.write(json.dumps({"number": row["number"], "sent": sent}) + "\n")
    text = "".join(choice["message"]["content"] or "" for _, choice in answers)
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def _logprobs(choice: dict[str, Any]) -> list[float]:
    return [one["logprob"] for one in choice["logprobs"]["content"]]
