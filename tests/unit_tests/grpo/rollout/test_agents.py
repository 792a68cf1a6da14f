# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Programs at the endpoint: what their requests lead to, in tokens."""

import asyncio
import contextlib
import gc
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import psutil
import pytest
from agent_world import EOS, ROW_LEN, Played, make_model, play, playing, prompt_of
from aiohttp import web
from stub_clients import serving

from torchtitan.grpo.config import Agent, Rollout, Workers
from torchtitan.grpo.rollout.agents import endpoint, episode, tool_calls
from torchtitan.grpo.rollout.agents.exchange import read_messages
from torchtitan.grpo.rollout.agents.transcript import Transcript
from torchtitan.grpo.rollout.agents.writer import Agents
from torchtitan.grpo.rollout.codec import pack, unpack
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.system.cores import usable_cores
from torchtitan.grpo.types import Generation, separated

USER = {"role": "user", "content": "7"}
OTHER = {"role": "user", "content": "8"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "sub")
]


@pytest.fixture(scope="module")
def model(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(repository, tmp_path_factory.mktemp("agents"))


async def say(client: Any, messages: list[dict[str, Any]], **settings: Any) -> Any:
    """Asks once; the messages then have the answer as well."""
    answer = await client.chat.completions.create(model="m", messages=messages, **settings)
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return answer


def rewriting(change: Any) -> Any:
    """A program that asks, changes its messages, and asks again."""

    async def program(client: Any, row: Any, access: Any) -> float:
        messages = [dict(USER)]
        await say(client, messages)
        await say(client, change(messages))
        return 1.0

    return program


async def branches(client: Any, row: Any, access: Any) -> None:
    messages = [dict(USER)]
    await say(client, messages)
    await say(client, [*messages, USER])
    await say(client, [*messages, OTHER])


async def sub_agent(client: Any, row: Any, access: Any) -> None:
    messages, inner = [dict(USER)], [{"role": "system", "content": "5"}, OTHER]
    await say(client, messages)
    await say(client, inner)
    await say(client, [*inner, USER])
    await say(client, [*messages, OTHER])


async def parallel(client: Any, row: Any, access: Any) -> None:
    await asyncio.gather(say(client, [USER]), say(client, [USER]), say(client, [OTHER]))


async def reordered_tools(client: Any, row: Any, access: Any) -> None:
    messages = [dict(USER)]
    await say(client, messages, tools=TOOLS)
    await say(client, [*messages, OTHER], tools=TOOLS[::-1])


async def truncated(client: Any, row: Any, access: Any) -> None:
    messages = [dict(USER)]
    await say(client, messages, max_tokens=2)
    await say(client, [*messages, OTHER])


async def prefix(client: Any, row: Any, access: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "12"}]
    settings = {"continue_final_message": True, "add_generation_prompt": False}
    await client.chat.completions.create(model="m", messages=messages, extra_body=settings)


async def continued(client: Any, row: Any, access: Any) -> None:
    messages = [dict(USER)]
    await say(client, messages, max_tokens=2)
    settings = {"continue_final_message": True, "add_generation_prompt": False}
    await client.chat.completions.create(model="m", messages=messages, extra_body=settings)


KINDS = {
    "grown": (rewriting(lambda m: [*m, OTHER]), ["u:7;a:[12<eos>]u:8;a:[34<eos>]"], 1),
    "empty answer": (rewriting(lambda m: [*m, OTHER]), ["u:7;a:[<eos>]u:8;a:[<eos>]"], 1),
    "regenerated": (rewriting(lambda m: m[:1]), ["u:7;a:[12<eos>]", "u:7;a:[34<eos>]"], 1),
    "summary": (
        rewriting(lambda m: [{"role": "user", "content": "9"}]),
        ["u:7;a:[12<eos>]", "u:9;a:[34<eos>]"],
        2,
    ),
    "dropped middle": (
        rewriting(lambda m: [m[0], OTHER]),
        ["u:7;a:[12<eos>]", "u:7;u:8;a:[34<eos>]"],
        2,
    ),
    "edited system prompt": (
        rewriting(lambda m: [{"role": "system", "content": "5"}, *m, OTHER]),
        ["u:7;a:[12<eos>]", "s:5;u:7;a:12<eos>u:8;a:[34<eos>]"],
        2,
    ),
    "edited answer": (
        rewriting(lambda m: [m[0], {"role": "assistant", "content": "0"}, OTHER]),
        ["u:7;a:[12<eos>]", "u:7;a:0<eos>u:8;a:[34<eos>]"],
        2,
    ),
    "two branches": (
        branches,
        ["u:7;a:[12<eos>]u:7;a:[34<eos>]", "u:7;a:12<eos>u:8;a:[56<eos>]"],
        1,
    ),
    "sub-agent": (
        sub_agent,
        ["u:7;a:[12<eos>]u:8;a:[78<eos>]", "s:5;u:8;a:[34<eos>]u:7;a:[56<eos>]"],
        2,
    ),
    "parallel": (parallel, 3, 2),
    "reordered tools": (reordered_tools, 2, 2),
    "truncated answer": (truncated, ["u:7;a:[12]<eos>u:8;a:[34<eos>]"], 1),
    "prefix": (prefix, ["u:7;a:12[12<eos>]"], 1),
    "continued": (continued, ["u:7;a:[12][34<eos>]"], 1),
}
ANSWERS = ["12<eos>", "34<eos>", "56<eos>", "78<eos>"]


@pytest.mark.parametrize("kind", KINDS)
async def test_rows_are_what_was_sent(model: Path, kind: str) -> None:
    program, expected, num_conversations = KINDS[kind]
    answers = ["<eos>"] if kind == "empty answer" else ANSWERS
    if kind in ("truncated answer", "continued"):
        answers = ["129<eos>", "34<eos>"]
    played = await play(model, program, answers)
    if kind != "continued":  # there two answers stand side by side
        played.check()
    if isinstance(expected, int):
        assert len(played.rows) == expected
    else:
        assert played.texts() == [text.replace("][", "") for text in expected]
    assert played.metrics["agent/conversations"] == num_conversations


async def test_a_request_costs_what_is_new_in_it(model: Path) -> None:
    codec = TextCodec(str(model), [EOS])
    said, rendered = Transcript(codec), []
    render = codec.template._render
    codec.template._render = lambda messages, **settings: (
        rendered.append(len(messages)) or render(messages, **settings)
    )
    messages, turn = [dict(USER)], codec.encode_continuation("12<eos>")
    for _ in range(20):
        context = said.context(messages)
        messages.append({"role": "assistant", "content": "12"})
        said.add(messages, (), context, turn)
        messages.append(dict(OTHER))
    assert said.context(messages).token_ids == codec.encode_continuation(
        "u:7;" + "a:12<eos>u:8;" * 20 + "a:"
    )
    assert max(rendered) <= 3 and len(rendered) <= 26
    kept = sum(len(one.own_ids) for one in said._of_messages.values())
    assert kept == len(context.token_ids) + len(turn)


async def test_tools_are_called_by_the_client(model: Path) -> None:
    async def program(client: Any, row: dict[str, Any], access: Any) -> dict[str, Any]:
        messages = [dict(USER)]
        answer = await say(client, messages, tools=TOOLS)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        assert answer.choices[0].finish_reason == "tool_calls"
        # As LangChain does, which writes the JSON anew.
        messages[-1]["tool_calls"][0]["function"]["arguments"] = '{"a":1}'
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        assert (await say(client, messages, tools=TOOLS)).choices[0].message.content == "2"
        return {"reward": 0.5}

    answers = ['<tool_call>{"name": "add",  "arguments": {"a": 1}}</tool_call><eos>', "2<eos>"]
    played = await play(model, program, answers)
    played.check()
    (text,) = played.texts()
    assert text.endswith(f"a:[{answers[0]}]t:2;a:[2<eos>]")
    assert played.whole.environment_reward == 0.5


@pytest.mark.parametrize("templated", [False, True])
async def test_thinking_is_shown_again_only_as_the_template_does(
    model: Path, templated: bool
) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        messages = [dict(USER)]
        answer = await say(client, messages)
        assert answer.choices[0].message.content == "2"
        assert answer.choices[0].message.reasoning_content == "1"
        await say(client, [*messages, OTHER])

    answers = ["<think>1</think>2<eos>", "3<eos>"]
    turns = "as_templated" if templated else "as_written"
    played = await play(model, program, answers, earlier_turns=turns)
    played.check()
    rows = [f"u:7;a:[{answers[0]}]u:8;a:[3<eos>]"]
    if templated:
        rows = [f"u:7;a:[{answers[0]}]", "u:7;a:2<eos>u:8;a:[3<eos>]"]
    assert played.texts() == rows


async def test_stop_strings_end_an_answer_behind_the_token_that_completes_them(model: Path) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        messages = [dict(USER)]
        answer = await say(client, messages, stop=["34", "5"])
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
            "12",
            "stop",
        )
        await say(client, [*messages, OTHER])

    played = await play(model, program, ["123456<eos>", "7<eos>"])
    assert played.texts() == ["u:7;a:[1234]<eos>u:8;a:[7<eos>]"]


async def test_a_long_answer_is_looked_through_for_stop_strings_whenever_it_has_doubled(
    model: Path,
) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        await say(client, [USER], stop=["8"])

    played = await play(model, program, ["7" * 200], max_new_tokens=300)
    assert [request.max_new_tokens for request in played.server.asked] == [64, 64, 128, 44]


async def test_other_routes(model: Path) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        text = await client.completions.create(model="m", prompt="1+1=", logprobs=1)
        assert (text.choices[0].text, text.choices[0].finish_reason) == ("12", "stop")
        await client.completions.create(model="m", prompt="1+1=12,")
        first = await client.responses.create(model="m", input="7", instructions="5")
        assert first.output_text == "56"
        second = await client.responses.create(model="m", input="8", previous_response_id=first.id)
        assert second.output_text == "78"
        assert (await client.models.list()).data[0].id == "policy"
        ids = [2, 3, 4]
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 3}}
        url = access.base_url.removesuffix("/v1") + "/inference/v1/generate"
        found = await client.post(url, body=body, cast_to=object)
        assert found["choices"][0]["token_ids"][-1] == EOS

    played = await play(model, program, ANSWERS)
    played.check()
    assert played.metrics["agent/requests"] == 5


async def test_streams_say_the_same(model: Path) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        messages = [dict(USER)]
        settings = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [
            c
            async for c in await client.chat.completions.create(
                model="m", messages=messages, **settings
            )
        ]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "12"
        assert chunks[-1].usage.completion_tokens == 3
        async with client.responses.stream(model="m", input="8") as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == "34"
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"

    (await play(model, program, ANSWERS)).check()


@pytest.mark.parametrize("allowed", [False, True])
async def test_other_sampling_is_ignored_or_not_trained(model: Path, allowed: bool) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        await say(client, [USER], temperature=0.5, seed=3)
        await say(client, [OTHER], temperature=1.0, extra_body={"top_k": 0})

    played = await play(model, program, ANSWERS, allow_sampling=allowed)
    assert [request.temperature for request in played.server.asked] == [
        0.5 if allowed else 1.0,
        1.0,
    ]
    first, second = played.texts()
    assert first == ("u:7;a:12<eos>" if allowed else "u:7;a:[12<eos>]")
    assert second == "u:8;a:[34<eos>]"
    assert played.whole.num_written == 6
    assert played.metrics["agent/untrained_answers"] == allowed
    assert played.metrics["agent/ignored_settings"] == 2 * (not allowed)


def asked(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


BAD = {
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "image with a text": asked([{"type": "image_url", "image_url": {"url": "u"}, "text": "cap"}]),
    "image in a text": asked([{"type": "text", "text": "a", "image": "x.png"}]),
    "images beside": {"messages": [USER | {"images": ["a.png"]}]},
    "video beside": {"messages": [USER | {"video": "a.mp4"}]},
    "pixels beside": {"messages": [USER | {"pixel_values": [[0]]}]},
    "audio of the assistant": {
        "messages": [USER, {"role": "assistant", "audio": {"id": "a"}}, USER]
    },
    "file with a text": asked([{"type": "file", "file": {}, "text": "a"}]),
    "number": asked([5]),
    "no name": {"messages": [USER, {"role": "assistant", "function_call": {"arguments": "{}"}}]},
    "tokens": {"messages": [USER], "max_tokens": 100.5},
    "no role": {"messages": [{"content": "7"}]},
    "no messages": {"messages": []},
    "n": {"messages": [USER], "n": 1000},
    "temperature": {"messages": [USER], "temperature": -1},
    "stop": {"messages": [USER], "stop": [3]},
    "too long": {"messages": [{"role": "user", "content": "7" * 400}]},
    "tools": {"messages": [USER], "tools": [{"type": "web_search"}]},
    "no list of tools": {"messages": [USER], "tools": 5},
    "no function": {"messages": [USER], "tools": [{"function": None}]},
    "no list of calls": {"messages": [USER, {"role": "assistant", "tool_calls": 5}]},
    "n beyond the turns": {"messages": [USER], "n": 2},
}


async def test_bad_requests_are_refused_and_cost_nothing(model: Path) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        for name, body in BAD.items():
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**{"model": "m"} | body)
            codes = {"too long": "context_length_exceeded", "n beyond the turns": "max_turns"}
            assert caught.value.code == codes.get(name), name
            values = {
                "n": "is 1000",
                "temperature": "is -1",
                "stop": "is [3]",
                "tokens": "is 100.5",
            }
            assert values.get(name, "") in caught.value.message
        await say(client, [USER])

    played = await play(model, program, ANSWERS, allow_sampling=True, max_turns=1)
    assert played.texts() == ["u:7;a:[12<eos>]"]


def test_messages_are_read_in_the_forms_of_all_clients() -> None:
    called = {"name": "add", "arguments": '{"a": 1}'}
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    no_media = {"images": [], "audio": None}
    read = read_messages(
        [
            {"role": "user", "content": parts, **no_media},
            {"role": "assistant", "content": None, "function_call": called, **no_media},
            {"role": "function", "name": "add", "content": {"type": "text", "text": "1"}},
            {"role": "assistant", "content": "d", "function_call": None},
        ]
    )
    assert [message["content"] for message in read] == ["abc", "", "1", "d"]
    assert [message["role"] for message in read] == ["user", "assistant", "tool", "assistant"]
    (call,) = read[1]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1}}
    assert "tool_calls" not in read[3]


async def test_keys_are_of_one_episode_while_it_runs(model: Path) -> None:
    kept: list[Any] = []

    async def program(client: Any, row: Any, access: Any) -> None:
        kept.append(access)
        await say(client, [USER])
        reward = client.with_options(max_retries=0)
        url = access.base_url + "/episodes/{}/reward"
        await reward.post(url.format(access.episode), body={"reward": 2}, cast_to=object)
        with pytest.raises(openai.PermissionDeniedError):
            await reward.post(url.format("0-0-999"), body={"reward": 3}, cast_to=object)
        with pytest.raises(openai.AuthenticationError):
            await say(client.with_options(api_key="wrong"), [USER])
        if len(kept) == 2:
            with pytest.raises(openai.AuthenticationError):
                await say(client.with_options(api_key=kept[0].key), [USER])

    async with playing(model, program, ANSWERS) as (writer, dispatcher, server, _):
        for _ in range(2):
            whole = await writer.start(prompt_of(server.codec), dispatcher.servers[server.url]).task
            assert whole.environment_reward == 2.0


async def test_a_seed_does_not_make_the_answers_of_a_group_equal(model: Path) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        await say(client, [USER], seed=3, n=2)

    async with playing(model, program, ANSWERS, allow_sampling=True) as world:
        writer, dispatcher, server, _ = world
        for sample in range(2):
            prompt = prompt_of(server.codec)
            await writer.start(prompt, dispatcher.servers[server.url], sample=sample).task
        assert len({request.seed for request in server.asked}) == 4


class OnlySecond(asyncio.Event):
    """Holds the second of those who wait."""

    num_waiting = 0

    async def wait(self) -> Any:
        self.num_waiting += 1
        return self.num_waiting != 2 or await super().wait()


async def test_one_of_two_answers_is_not_trained_if_the_client_leaves(model: Path) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        server.held = OnlySecond()
        first = asyncio.create_task(say(client, [OTHER], n=2))
        await server.arrived.wait()
        await say(client, [{"role": "user", "content": "9"}])
        first.cancel()
        await asyncio.wait({first})
        await say(client, [USER])

    async with playing(model, program, ANSWERS) as (writer, dispatcher, server, _):
        prompt = prompt_of(server.codec)
        whole = await writer.start(prompt, dispatcher.servers[server.url]).task
        rows = Played(whole, prompt, server).texts()
        assert rows == ["u:7;a:[78<eos>]", "u:9;a:[56<eos>]"]


@pytest.mark.parametrize("parse", tool_calls.PARSERS.values())
@pytest.mark.parametrize(
    "text",
    [
        "[" * 10_000,
        '[TOOL_CALLS]{"name": ' + "[" * 10_000,
        f"<tool_call>{'[' * 10_000}</tool_call>",
        "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_never_ends_the_run(parse: tool_calls.Parser, text: str) -> None:
    tools = [{"function": {"name": "add", "parameters": [1]}}]
    spoken = parse(text, tools)
    assert spoken.text == text or spoken.calls == [tool_calls.ToolCall("add", '{"a": "1"}')]


@pytest.mark.parametrize(
    "kind", ["client leaves", "client asks again", "program ends", "server fails"]
)
async def test_an_unanswered_request_is_not_trained(model: Path, kind: str) -> None:
    held = asyncio.Event()

    async def program(client: Any, row: Any, access: Any) -> None:
        messages = [dict(USER)]
        if kind != "server fails":
            await say(client, messages)
        question = [*messages, OTHER] if kind == "client asks again" else [OTHER]
        server.held, server.fails = held, kind == "server fails"
        server.arrived.clear()
        second = asyncio.create_task(say(client.with_options(max_retries=0), [*question]))
        await server.arrived.wait()
        if kind.startswith("client"):
            second.cancel()
            await asyncio.wait({second})
            held.set()
            await say(client, [*question])
        elif kind == "server fails":
            held.set()
            await second

    async with playing(model, program, ANSWERS) as (writer, dispatcher, server, programs):
        trajectory = writer.start(prompt_of(server.codec), dispatcher.servers[server.url])
        async with asyncio.timeout(60):
            await trajectory.until_ended()
        whole = trajectory.result()
        assert dispatcher.in_flight == 0
        if kind == "server fails":
            assert whole is None and not programs.failed
            return
        played = Played(whole, prompt_of(server.codec), server)
        assert (
            played.texts()
            == {
                "client leaves": ["u:7;a:[12<eos>]", "u:8;a:[56<eos>]"],
                "client asks again": ["u:7;a:[12<eos>]u:8;a:[56<eos>]"],
                "program ends": ["u:7;a:[12<eos>]"],
            }[kind]
        )


async def raw(
    url: str, key: str, body: Any, path: str = "/chat/completions", scheme: str = "Bearer "
) -> tuple[int, Any]:
    headers = {"Authorization": scheme + key}
    async with aiohttp.ClientSession() as session:
        try:
            async with session.post(url + path, data=body, headers=headers) as answer:
                return answer.status, await answer.read()
        except aiohttp.ClientError as error:  # the server stops reading
            return 0, error


@pytest.mark.parametrize("scheme", ["Basic ", "Token ", "ApiKey ", "", "Bearer: ", "BearerBearer "])
async def test_a_key_counts_under_its_scheme_alone(scheme: str, model: Path) -> None:
    body = json.dumps({"messages": [USER]}).encode()

    async def program(client: Any, row: Any, access: Any) -> None:
        found = await raw(access.base_url, access.key, body, scheme=scheme)
        assert found[0] == 401 and b"invalid_api_key" in found[1]
        assert (await raw(access.base_url, access.key, body, scheme="bearer "))[0] == 200

    played = await play(model, program, ANSWERS)
    assert played.texts() == ["u:7;a:[12<eos>]"]


async def test_useless_bodies_are_refused_and_bounded(model: Path) -> None:
    async def pieces(number: int) -> AsyncIterator[bytes]:
        for _ in range(number):
            yield b"x" * 2**20

    async def program(client: Any, row: Any, access: Any) -> None:
        url, key = access.base_url, access.key
        before = psutil.Process().memory_info().rss
        assert (await raw(url, key, pieces(100)))[0] in (0, 413)
        assert psutil.Process().memory_info().rss - before < 64 * 2**20
        half = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        for body in (b"{", b"[1]", b"\xff", b"[" * 100_000, b"null", half):
            assert (await raw(url, key, body))[0] == 400, body[:10]
        assert (await raw(url, key, b"{}", "/nowhere"))[0] == 404
        reward = f"/episodes/{access.episode}/reward"
        huge = b'{"reward": 1%s}' % (b"0" * 400)
        above = b'{"reward": -1e13}'
        for body in (
            b"{}",
            b'{"reward": true}',
            b'{"reward": NaN}',
            b'{"reward": "1"}',
            huge,
            above,
        ):
            assert (await raw(url, key, body, reward))[0] == 400, body
        await say(client, [USER])

    played = await play(model, program, ANSWERS)
    assert played.texts() == ["u:7;a:[12<eos>]"]
    assert played.whole.environment_reward is None


MEGABYTE = "7" * 10**6
LONG = {
    "a message": ("/chat/completions", {"messages": [{"role": "user", "content": MEGABYTE}]}),
    "many messages": ("/chat/completions", {"messages": [USER] * 50_000}),
    "a tool": ("/chat/completions", {"messages": [USER], "tools": [
        {"type": "function", "function": {"name": "add", "description": MEGABYTE}}]}),
    "an answer": ("/chat/completions", {"messages": [
        USER, {"role": "assistant", "content": MEGABYTE}, USER]}),
    "a prefix": ("/chat/completions", {"continue_final_message": True, "messages": [
        USER, {"role": "assistant", "content": MEGABYTE}]}),
    "a text": ("/completions", {"prompt": MEGABYTE}),
    "a response": ("/responses", {"input": MEGABYTE}),
    "token ids": ("/completions", {"prompt": [7] * 10**5}),
    "a whole row": ("/completions", {"prompt": [7] * ROW_LEN}),
}  # fmt: skip


@pytest.mark.parametrize("kind", LONG)
async def test_long_requests_are_refused_before_they_are_tokenized(model: Path, kind: str) -> None:
    path, body = LONG[kind]
    num_characters = 0

    class Counting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def encode(self, text: str, **settings: Any) -> Any:
            nonlocal num_characters
            num_characters += len(text)
            return self._inner.encode(text, **settings)

    async def program(client: Any, row: Any, access: Any) -> None:
        writer._settings.codec._tokenizer = Counting(writer._settings.codec._tokenizer)
        status, answer = await raw(access.base_url, access.key, json.dumps(body), path)
        assert (status, json.loads(answer)["error"]["code"]) == (400, "context_length_exceeded")
        await say(client, [USER])

    tools = {"parser": lambda text, tools: None}
    async with playing(model, program, ANSWERS) as (writer, dispatcher, server, _):
        writer._settings = replace(writer._settings, **tools)
        await writer.start(prompt_of(server.codec), dispatcher.servers[server.url]).task
    assert num_characters < 10**5


async def test_one_episode_cannot_use_all_threads(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, gate = [], threading.Event()

    def read(number: int) -> int:
        begun.append(number)
        assert gate.wait(60)
        if number == 1:
            raise ValueError("it is refused, but its client has left")
        return number

    async with playing(model, program=branches, answers=ANSWERS) as (writer, dispatcher, server, _):
        started = dispatcher.servers[server.url], prompt_of(server.codec)
        one, other = (
            episode.AgentEpisode(writer._settings, started[1], sample, 0, started[0])
            for sample in (0, 1)
        )
        tasks = [asyncio.create_task(one.in_thread(lambda i=i: read(i))) for i in range(6)]
        async with asyncio.timeout(60):
            while len(begun) < 2:
                await asyncio.sleep(0.01)
            # Their clients leave, but their threads go on; what waits is not begun.
            for task in tasks[:4]:
                task.cancel()
            await asyncio.wait(tasks[:4])
            assert await other.in_thread(lambda: "another episode") == "another episode"
            assert begun == [0, 1]
            gate.set()
            assert await asyncio.gather(*tasks[4:]) == [4, 5]
        assert begun == [0, 1, 4, 5]
        del tasks
        gc.collect()
        assert not caplog.records  # of an exception that nobody has seen
        for each in (one, other):
            each.close()


BROKEN = {
    "chunk": b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nKEY\r\n",
    "gzip": b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nKEY",
    "short": b"Content-Length: 3\r\n\r\n{",
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_broken_body_is_no_failure_of_the_run(
    model: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        address = access.base_url.split("/")[2]
        reader, writer = await asyncio.open_connection(*address.split(":"))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {access.key}"
        )
        writer.write(f"{head}\r\n".encode() + BROKEN[kind])
        writer.write_eof()
        answer = await reader.read()
        assert b" 400 " in answer.partition(b"\r\n")[0] or not answer
        writer.close()
        await say(client, [USER])

    played = await play(model, program, ANSWERS)
    assert played.texts() == ["u:7;a:[12<eos>]"]
    assert "KEY" not in caplog.text and "Traceback" not in caplog.text


async def test_few_programs_start_at_once_and_only_until_their_first_request(model: Path) -> None:
    num_begun, starts, ends = 0, asyncio.Event(), asyncio.Event()

    async def program(client: Any, row: Any, access: Any) -> None:
        nonlocal num_begun
        num_begun += 1
        await starts.wait()
        await say(client, [USER])
        await ends.wait()

    async with (
        playing(model, program, ANSWERS) as (writer, dispatcher, server, _),
        asyncio.timeout(60),
    ):
        writer._players = replace(writer._players, starting=asyncio.Semaphore(2))
        running = [
            writer.start(prompt_of(server.codec), dispatcher.servers[server.url]) for _ in range(5)
        ]
        while num_begun < 2:
            await asyncio.sleep(0)
        for _ in range(100):  # time enough for more
            await asyncio.sleep(0)
        assert num_begun == 2
        starts.set()
        while num_begun < 5:  # while none has ended
            await asyncio.sleep(0.01)
        running.pop().task.cancel()
        ends.set()
        assert [one.environment_reward for one in await asyncio.gather(*(r.task for r in running))]


def test_a_command_starts_by_cores() -> None:
    agent = Agent(command=["python"])
    config: Any = SimpleNamespace(agent=agent, rollout=Rollout(), workers=Workers(), seq_len=9)
    assert Agents.of(config, DropLog()).starting._value == usable_cores()


async def test_own_time_counts_from_the_first_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)

    async def program(client: Any, row: Any, access: Any) -> None:
        nonlocal now
        now += 200
        await say(client, [USER])
        now += 50

    monkeypatch.setattr(episode, "time", clock)
    metrics = (await play(model, program, ANSWERS)).metrics
    assert (metrics["agent/start_seconds"], metrics["agent/own_seconds"]) == (200, 50)


async def test_a_program_that_never_asks_is_ended(model: Path) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        await asyncio.Event().wait()

    async with playing(model, program, ANSWERS, timeout_seconds=0.2) as world:
        writer, dispatcher, server, programs = world
        trajectory = writer.start(prompt_of(server.codec), dispatcher.servers[server.url])
        async with asyncio.timeout(60):
            await trajectory.until_ended()
    (failure,) = programs.failed
    assert failure.kind == "timeout" and "sent no request within 0.2 s" in str(failure)


async def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_WRITE_SECONDS", 0.2)
    ended = asyncio.Event()

    async def handler(http: web.Request) -> web.StreamResponse:
        response = await endpoint._written(http, web.StreamResponse(), [b"x" * 2**24] * 4)
        ended.set()
        return response

    async with serving(handler) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**10)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(60):
            await ended.wait()
            num_read = 0
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(2**20):
                    num_read += len(part)
        assert num_read < 4 * 2**24
        writer.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_answers_that_share_a_row_have_one_reward(
    model: Path, order: tuple[int, int]
) -> None:
    async def program(client: Any, row: Any, access: Any) -> float:
        messages, url = [dict(USER)], "/episodes/current/reward"

        async def give(answer: Any, reward: float) -> None:
            body = {"reward": reward, "response_id": answer.id}
            await client.post(url, body=body, cast_to=object)

        answers = [await say(client, messages)]
        answers.append(await say(client, messages + [OTHER]))
        branch = await say(client, [OTHER])
        await give(answers[order[0]], 0.5)
        await give(answers[order[0]], 0.25)  # the same answer may be rewarded again
        with pytest.raises(openai.BadRequestError, match="must not share its row with an answer"):
            await give(answers[order[1]], 1.0)
        await give(branch, 1.0)
        return 0.0

    whole = (await play(model, program, ANSWERS)).whole
    rewards = [(one.environment_reward, one.num_trained) for one in separated([whole])]
    assert rewards == [(0.25, 6), (1.0, 3)]


@pytest.mark.parametrize("num_rewarded", [1, 2])
async def test_rows_may_have_rewards_of_their_own(model: Path, num_rewarded: int) -> None:
    async def program(client: Any, row: Any, access: Any) -> float:
        answers = [await say(client, [user]) for user in (USER, OTHER)]
        url = "/episodes/current/reward"
        for answer in answers[-num_rewarded:]:
            await client.post(url, body={"reward": 0.25, "response_id": answer.id}, cast_to=object)
        with pytest.raises(openai.BadRequestError):
            await client.post(url, body={"reward": 1, "response_id": "chatcmpl-1"}, cast_to=object)
        return 0.5

    whole = (await play(model, program, ANSWERS)).whole
    first, second = separated([whole])
    assert [first.environment_reward, second.environment_reward] == [
        0.5 if num_rewarded == 1 else 0.25,
        0.25,
    ]
    assert [first.num_trained, second.num_trained] == [3, 3]
    packed = pack(whole)
    assert [len(one.token_ids) for one in separated([unpack(packed, Generation)])] == [
        len(first.token_ids),
        len(second.token_ids),
    ]
