# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a client receives for what the model wrote, and what it is told about its request."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from agent_world import TEMPLATE, make_model, play

from torchtitan.grpo.rollout.agents.transcript import _meaning

USER = {"role": "user", "content": "7"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "sub")
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CUT = '<tool_call>{"name": "sub", "argu'
OPENS, OFF = "<think>", "<think></think>"
MISTRAL = TEMPLATE.replace(
    '<tool_call>{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>',
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}",
).replace("{% else %}", "{% else %}{{ m.tool_call_id }}")


@pytest.fixture
def model(repository: Path, tmp_path: Path) -> Path:
    return make_model(repository, tmp_path)


async def say(client: Any, messages: list[Any], **settings: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **settings)


async def streamed(client: Any, **settings: Any) -> Any:
    """Puts the parts of a stream together."""
    message = SimpleNamespace(content="", reasoning_content="", tool_calls=[])
    reason = None
    async for chunk in await say(client, [USER], stream=True, **settings):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        message.content += delta.content or ""
        message.reasoning_content += getattr(delta, "reasoning_content", None) or ""
        message.tool_calls += delta.tool_calls or []
    return SimpleNamespace(message=message, finish_reason=reason)


def opening(repository: Path, folder: Path, opened: str) -> Path:
    """A model whose template opens the model's turn with some text."""
    begin = "{% if add_generation_prompt %}a:"
    return make_model(repository, folder, TEMPLATE.replace(begin, begin + opened))


CHOICES = {
    # opened, written, cut, content, thinking, number of calls
    "answer": ("", "4", False, "4", "", 0),
    "cut answer": ("", "4", True, "4", "", 0),
    "call": ("", CALL, False, None, "", 1),
    "two calls": ("", f"Hi {CALL}{CALL}", False, "Hi", "", 2),
    "call, then cut": ("", CALL + CUT, True, CUT, "", 1),
    "call, then cut text": ("", f"{CALL} and so", True, "and so", "", 1),
    "cut behind a call": ("", CALL, True, None, "", 1),
    "cut call": ("", CUT, True, CUT, "", 0),
    "call in cut thinking": ("", f"<think>Maybe {CALL} but ", True, "", f"Maybe {CALL} but", 0),
    "call in cut thinking, opened": (OPENS, f"Maybe {CALL} but ", True, "", f"Maybe {CALL} but", 0),
    "call in thinking that has no end": (OPENS, f"Maybe {CALL}", False, "", f"Maybe {CALL}", 0),
    "cut thinking": ("", "<think>Let me", True, "", "Let me", 0),
    "call behind thinking": (OPENS, f"t</think>{CALL}", False, None, "t", 1),
    "call in thinking": (OPENS, f"t {CALL}</think>4", False, "4", f"t {CALL}", 0),
    "end tag, off": (OFF, "The tag </think> ends it.", False, "The tag </think> ends it.", "", 0),
    "end tag, never on": ("", "A </think> ends it.", False, "A </think> ends it.", "", 0),
    "end tag, had ended": (OPENS, "t</think>A </think> ends.", False, "A </think> ends.", "t", 0),
    "call, off": (OFF, f"{CALL}</think>", False, "</think>", "", 1),
    "end tag in arguments": ("", CALL.replace("1", '"</tool_call>"'), False, None, "", 1),
    "NaN": ("", CALL.replace("1", "NaN"), False, CALL.replace("1", "NaN"), "", 0),
    "null": ("", CALL.replace('{"a": 1}', "null"), False, None, "", 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_what_the_model_wrote(
    repository: Path, tmp_path: Path, kind: str, stream: bool
) -> None:
    opened, written, is_cut, content, thinking, num_calls = CHOICES[kind]

    answer = written if is_cut else f"{written}<eos>"

    async def program(client: Any, row: Any, access: Any) -> None:
        settings = {"tools": TOOLS, "max_tokens": len(written) if is_cut else 200}
        if stream:
            choice = await streamed(client, **settings)
        else:
            choice = (await say(client, [USER], **settings)).choices[0]
        message, calls = choice.message, choice.message.tool_calls or []
        assert (message.content or "", len(calls)) == (content or "", num_calls)
        assert (getattr(message, "reasoning_content", None) or "") == thinking
        reason = "length" if is_cut else "tool_calls" if num_calls else "stop"
        assert choice.finish_reason == reason
        for call in calls:
            json.loads(call.function.arguments, parse_constant=pytest.fail)

    model = opening(repository, tmp_path, opened)
    played = await play(model, program, [answer], max_new_tokens=200)
    assert played.texts()[0].endswith(f"a:{opened}[{answer}]")


async def test_a_cut_response_is_incomplete_whatever_calls_it_has(model: Path) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        most = len(CALL + CUT)
        found = await client.responses.create(
            model="policy", input="7", tools=tools, max_output_tokens=most
        )
        assert (found.status, found.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert [item.type for item in found.output] == ["message", "function_call"]

    await play(model, program, [CALL + CUT])


@pytest.mark.parametrize("opened", ["", OPENS])
async def test_thinking_that_was_cut_goes_on(repository: Path, tmp_path: Path, opened: str) -> None:
    begin = "" if opened else "<think>"

    async def program(client: Any, row: Any, access: Any) -> None:
        first = (await say(client, [USER], max_tokens=len(begin) + 2)).choices[0].message
        assert (first.content, first.reasoning_content) == ("", "12")
        settings = {"continue_final_message": True, "add_generation_prompt": False}
        messages = [USER, {"role": "assistant", "content": ""}]
        second = (await say(client, messages, extra_body=settings)).choices[0].message
        assert (second.content, second.reasoning_content) == ("4", "3")
        last = await say(
            client, [USER, {"role": "assistant", "content": "4</think>"}], extra_body=settings
        )
        assert last.choices[0].message.content == "5</think>6"

    answers = [f"{begin}12", "3</think>4<eos>", "5</think>6<eos>"]
    played = await play(opening(repository, tmp_path, opened), program, answers)
    assert played.texts()[0] == f"u:7;a:{opened}[{begin}123</think>4<eos>]"


@pytest.mark.parametrize(
    ("shown", "begun", "wrote", "content", "thinking"),
    [
        (OFF, "", "<think>3</think>4", "<think>3</think>4", None),
        (OFF, "7", "<think>3</think>4", "<think>3</think>4", None),
        ("", "", "<think>3</think>4", "4", "3"),
        ("", "<think>7", "3</think>4", "4", "3"),
        (OPENS, "", "3</think>4", "4", "3"),
        (OPENS, "7", "3</think>4", "4", "3"),
    ],
)
async def test_a_begun_turn_goes_on_in_the_state_that_is_shown(
    repository: Path,
    tmp_path: Path,
    shown: str,
    begun: str,
    wrote: str,
    content: str,
    thinking: Any,
) -> None:
    template = TEMPLATE.replace("{{ m.content.split", shown + "{{ m.content.split")

    async def program(client: Any, row: Any, access: Any) -> None:
        messages = [USER, {"role": "assistant", "content": begun}]
        body = {"continue_final_message": True}
        found = (await say(client, messages, extra_body=body)).choices[0].message
        assert found.content == content
        assert getattr(found, "reasoning_content", None) == thinking

    await play(make_model(repository, tmp_path, template), program, [f"{wrote}<eos>"])


@pytest.mark.parametrize(
    ("wrote", "resent"),
    [
        ("1.0", "1"),
        ("1", "1.0"),
        ("1e2", "100"),
        ("-0.0", "0"),
        ("12345678901234567890123", "1.2345678901234568e+22"),
        ('[1.0, {"k": 2.0}]', '[1,{"k":2}]'),
        ('"1.0"', '"1.0"'),
        ("true", "true"),
    ],
)
async def test_numbers_as_another_language_writes_them_continue_the_row(
    model: Path, wrote: str, resent: str
) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        answer = (await say(client, [USER], tools=TOOLS)).choices[0].message
        function = {"name": "add", "arguments": f'{{"a":{resent}}}'}
        call = {"id": answer.tool_calls[0].id, "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        await say(client, [USER, {"role": "assistant", "tool_calls": [call]}, result], tools=TOOLS)

    answers = [CALL.replace("1", wrote) + "<eos>", "2<eos>"]
    (text,) = (await play(model, program, answers)).texts()
    assert text.endswith(f"a:[{answers[0]}]t:2;a:[2<eos>]")


@pytest.mark.parametrize("resent", ['{"a": true}', '{"a": "1"}', '{"a": 2}'])
async def test_other_values_begin_a_row(model: Path, resent: str) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        answer = (await say(client, [USER], tools=TOOLS)).choices[0].message.model_dump()
        answer["tool_calls"][0]["function"]["arguments"] = resent
        await say(client, [USER, answer, {"role": "tool", "content": "2"}], tools=TOOLS)

    assert len((await play(model, program, [f"{CALL}<eos>", "2<eos>"])).texts()) == 2


def test_results_of_different_calls_are_different_messages() -> None:
    results = [{"role": "tool", "tool_call_id": call, "content": "2"} for call in ("a", "b")]
    assert len({_meaning(message) for message in results}) == 2
    assert len({_meaning(message | {"role": "user"}) for message in results}) == 1


DEEP = "[" * 900 + "]" * 900


async def test_what_is_nested_too_deeply_is_text_or_a_bad_request(model: Path) -> None:
    wrote = CALL.replace("1", "[" * 101 + "]" * 101)

    async def program(client: Any, row: Any, access: Any) -> None:
        messages: list[Any] = [USER]
        message = (await say(client, messages, tools=TOOLS[:1])).choices[0].message
        assert (message.content, message.tool_calls) == (wrote, None)
        arguments = json.loads("[" * 450 + "]" * 450)
        deep = {"id": "1", "function": {"name": "add", "arguments": {"a": arguments}}}
        schema = {"type": "function", "function": {"name": "add", "parameters": {"a": arguments}}}
        for body in (
            {"messages": [{"role": "assistant", "tool_calls": [deep]}, USER]},
            {"messages": [USER], "tools": [schema]},
            {"messages": [USER], "metadata": {"a": arguments}},
        ):
            with pytest.raises(openai.BadRequestError, match="nested deeper than 100 levels"):
                await client.chat.completions.create(model="policy", **body)
        # As text it is shown as it is.
        function = {"name": "add", "arguments": f'{{"a": {DEEP}}}'}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
            await say(client, [USER, {"role": "assistant", "tool_calls": [call]}], tools=TOOLS)
        await say(
            client, [*messages, {"role": "assistant", "content": wrote}, USER], tools=TOOLS[:1]
        )

    # The row goes on, although its call is text.
    (text,) = (await play(model, program, [f"{wrote}<eos>", "2<eos>"], max_new_tokens=300)).texts()
    assert text.endswith(f"[{wrote}<eos>]u:7;a:[2<eos>]")


async def test_special_tokens_that_mark_calls_are_read_and_ids_are_those_of_the_model(
    repository: Path, tmp_path: Path
) -> None:
    marks = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[MORE]"]
    wrote = '12[MORE][TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS]{"a": "[ARGS]"}'

    async def program(client: Any, row: Any, access: Any) -> None:
        message = (await say(client, [USER], tools=TOOLS)).choices[0].message
        (call,) = message.tool_calls
        assert (message.content, call.id) == ("12", "abc123XYZ")
        assert json.loads(call.function.arguments) == {"a": "[ARGS]"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "8"}
        await say(client, [USER, message, result], tools=TOOLS)
        plain = (await say(client, [USER])).choices[0].message  # as no tools were given
        assert plain.content == '12addabc123XYZ{"a": ""}'

    model = make_model(repository, tmp_path, MISTRAL, marks)
    played = await play(model, program, [f"{wrote}<eos>", "2<eos>", f"{wrote}<eos>"])
    assert f"a:[{wrote}<eos>]t:abc123XYZ8;a:[2<eos>]" in played.texts()[1]


async def test_tools_in_an_unknown_form_are_refused(repository: Path, tmp_path: Path) -> None:
    """As GLM writes them: between the tags of another form."""
    unknown = TEMPLATE.replace(
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
        "{{ c.function.name }}<arg_key>k</arg_key>",
    )
    assert unknown != TEMPLATE

    async def program(client: Any, row: Any, access: Any) -> None:
        with pytest.raises(openai.BadRequestError, match="in a known form"):
            await say(client, [USER], tools=TOOLS)
        await say(client, [USER])

    await play(make_model(repository, tmp_path, unknown), program, ["12<eos>"])


TOLD = {
    "form": ({"response_format": {"type": "json_object"}}, "'response_format'. That is ignored"),
    "structure": ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
    "required call": ({"tools": TOOLS, "tool_choice": "required"}, "asks for 'tool_choice'"),
    "named call": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        "asks for 'tool_choice'",
    ),
    "one call": ({"tools": TOOLS, "parallel_tool_calls": False}, "asks for 'parallel_tool_calls'"),
    "sampling": ({"temperature": 0.5}, "asks for 'temperature'"),
    "penalty": ({"frequency_penalty": 1}, "asks for 'frequency_penalty'"),
    "thinking": (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        "'chat_template_kwargs'. That is ignored: the policy answers as [rollout] and [prompts] say",
    ),
    "effort": ({"reasoning_effort": "high"}, "'reasoning_effort'"),
    "guided": ({"extra_body": {"guided_json": {"type": "object"}}}, "'guided_json'"),
    "ends": ({"extra_body": {"stop_token_ids": [5]}}, "'stop_token_ids'"),
    "no end": ({"extra_body": {"ignore_eos": True}}, "'ignore_eos'"),
    "words": ({"extra_body": {"bad_words": ["x"]}}, "'bad_words'"),
    "functions": ({"functions": [{"name": "add"}]}, "'functions'"),
    "no turn": ({"extra_body": {"add_generation_prompt": False}}, "'add_generation_prompt'"),
    "best of": ({"extra_body": {"best_of": 2}}, "'best_of'"),
    "beams": ({"extra_body": {"use_beam_search": True}}, "'use_beam_search'"),
    "unknown": ({"extra_body": {"a\nb" + "c" * 999: 1}}, r"'a\nbccc"),
    "model": ({"model": "gpt\n4"}, r"asks for the model 'gpt\n4'. The policy answers"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOLD)
async def test_what_is_ignored_is_told_once(
    model: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    body, text = TOLD[kind]

    async def program(client: Any, row: Any, access: Any) -> None:
        for _ in range(2):
            await client.chat.completions.create(**{"model": "policy", "messages": [USER]} | body)

    played = await play(model, program, ["12<eos>"])
    assert [text in record.getMessage() for record in caplog.records] == [True]
    assert played.metrics["agent/ignored_settings"] == 2 * (kind != "model")


async def test_what_is_not_ignored_is_not_told(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        for choice in ("auto", "none", openai.omit):
            await say(client, [USER], tools=TOOLS, tool_choice=choice, stop=["9"], user="me")
        await say(client, [USER], response_format={"type": "text"}, parallel_tool_calls=True)
        harmless = {
            "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "logprobs": True,
            "modalities": ["text"], "safety_identifier": "me", "prompt_cache_key": "a",
        }  # fmt: skip
        servers = {
            "best_of": 1, "ignore_eos": False, "stop_token_ids": [], "add_generation_prompt": True,
            "skip_special_tokens": True, "use_beam_search": False, "priority": 1, "request_id": "a",
            "min_p": 0.0, "guided_json": None, "chat_template_kwargs": {}, "length_penalty": 1.0,
        }  # fmt: skip
        await say(client, [USER], **harmless, extra_body=servers)
        await client.responses.create(
            model="policy", input="7", text={"format": {"type": "text"}}, tool_choice="auto"
        )

    played = await play(model, program, ["12<eos>"])
    assert not caplog.records and not played.metrics["agent/ignored_settings"]


async def test_a_form_of_responses_is_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        await client.responses.create(
            model="policy", input="7", text={"format": {"type": "json_object"}}
        )

    await play(model, program, ["12<eos>"])
    assert ["asks for 'text.format'" in one.getMessage() for one in caplog.records] == [True]


async def test_other_routes_are_told_once_each_and_not_without_end(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(client: Any, row: Any, access: Any) -> None:
        caplog.set_level(logging.WARNING)
        for _ in range(2):
            with pytest.raises(openai.NotFoundError, match="a base_url of their own"):
                await client.embeddings.create(model="policy", input="7")
            with pytest.raises(openai.NotFoundError):
                await client.get("/chat/completions", cast_to=object)
        assert len(caplog.records) == 2
        assert "POST '/v1/embeddings'" in caplog.records[0].getMessage()
        for number in range(100):
            with pytest.raises(openai.NotFoundError):
                await client.get(f"/{number}", cast_to=object)
        assert len(caplog.records) == 32
        await say(client, [USER])

    await play(model, program, ["12<eos>"])
