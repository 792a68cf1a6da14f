# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What models write, in each form of calls, and the text and the calls that it is.

``tool_call_texts.jsonl`` has the tools in its first line, and then the texts. Values of calls are
compared as JSON: 1 is not 1.0.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan.grpo.rollout.agents import tool_calls
from torchtitan.grpo.rollout.agents.transcript import divided, opened_by

FILE = Path(__file__).parent / "tool_call_texts.jsonl"
FIRST, *TEXTS = map(json.loads, FILE.read_text().splitlines())
TOOLS = FIRST["tools"]


@pytest.mark.parametrize("one", TEXTS, ids=[f"{one['form']}: {one['case']}" for one in TEXTS])
def test_what_a_model_wrote_is_read_as_it_was_meant(one: dict[str, Any]) -> None:
    _, answer, _ = divided(one["text"], None)
    spoken = tool_calls.PARSERS[one["form"]](answer, TOOLS)
    calls = [[call.name, json.loads(call.arguments)] for call in spoken.calls]
    assert (spoken.text, json.dumps(calls)) == (one["content"], json.dumps(one["calls"]))


@pytest.mark.parametrize("form", tool_calls.PARSERS)
def test_an_answer_that_is_cut_anywhere_has_whole_calls_or_none(form: str) -> None:
    whole = next(one for one in TEXTS if one["form"] == form and len(one["calls"]) == 2)
    for end in range(len(whole["text"])):
        spoken = tool_calls.PARSERS[form](whole["text"][:end], TOOLS)
        calls = [[call.name, json.loads(call.arguments)] for call in spoken.calls]
        assert calls == whole["calls"][: len(calls)]
        assert calls or spoken.text == whole["text"][:end]


@pytest.mark.parametrize(
    "quoted",
    ["a </tool_call> b", "{call}", "Use\n{call}\n{call}\nso", "`{call}` </parameter> {call}"],
)
@pytest.mark.parametrize("form", tool_calls.PARSERS)
def test_no_cut_of_a_call_that_quotes_calls_is_another_call(form: str, quoted: str) -> None:
    called = next(one for one in TEXTS if one["form"] == form and len(one["calls"]) == 1)["text"]
    value = quoted.format(call=called)
    other = {"name": "write_file", "arguments": {"content": value, "path": "p"}}
    written = {
        "Qwen3-Coder": "<tool_call>\n<function=write_file>\n<parameter=content>\n"
        f"{value}\n</parameter>\n<parameter=path>\np\n</parameter>\n</function>\n</tool_call>",
        "Hermes": f"<tool_call>\n{json.dumps(other)}\n</tool_call>",
        "Mistral": f"[TOOL_CALLS]write_file[ARGS]{json.dumps(other['arguments'])}",
        "DeepSeek": "<｜tool▁call▁begin｜>write_file<｜tool▁sep｜>"
        f"{json.dumps(other['arguments'])}<｜tool▁call▁end｜>",
        "Llama 3": json.dumps(other),
    }[form]
    for end in range(len(written) + 1):
        calls = tool_calls.PARSERS[form](written[:end], TOOLS).calls
        assert all(json.loads(call.arguments) == other["arguments"] for call in calls)
    assert len(calls) == 1


@pytest.mark.parametrize("value", ["[['x']," * 20_000, "-" * 60_000, "['x'," * 150 + "]" * 150])
def test_a_literal_that_is_too_large_or_deep_stays_text(value: str) -> None:
    text = f"<function=f>\n<parameter=oa>\n[{value}]\n</parameter>\n</function>\n</tool_call>"
    (call,) = tool_calls.PARSERS["Qwen3-Coder"](text, TOOLS).calls
    assert json.loads(call.arguments) == {"oa": f"[{value}]"}


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        (["abc123XYZ", "abc123XYW"], ["abc123XYZ", "abc123XYW"]),
        (["short", "abc123XYZ"], ["", "abc123XYZ"]),
        (["abc-23XYZ", "abc123XYZ0"], ["", ""]),
    ],
)
def test_ids_that_a_model_wrote_are_kept_if_templates_take_them(
    ids: list[str], kept: list[str]
) -> None:
    calls = [{"name": "f", "arguments": {}, "id": one} for one in ids]
    spoken = tool_calls.PARSERS["Mistral"]("[TOOL_CALLS] " + json.dumps(calls), TOOLS)
    assert [call.id for call in spoken.calls] == kept


@pytest.mark.parametrize(
    ("shown", "written", "thinking", "answer"),
    [
        ("a:", "<think>\nt\n</think>\n\n4", "t", "4"),
        ("a:", "<think>t", "t", ""),
        ("a:", "t</think>4", "", "t</think>4"),
        ("a:", "4 <think>t</think>", "", "4 <think>t</think>"),
        ("a:<think>\n", "t\n</think>\n\n4</think>", "t", "4</think>"),
        ("a:<think>\n", "<think>t</think>4", "t", "4"),
        ("a:<think>\n", "t", "t", ""),
        ("a:<think>", "t [/THINK] u</think>4", "t [/THINK] u", "4"),
        ("a:<think>\n\n</think>\n\n", "The tag </think> ends it.", "", "The tag </think> ends it."),
        ("a:<think>\n\n</think>\n\n", "<think> begins it", "", "<think> begins it"),
        ("a:</think>", "4", "", "4"),
        ("a:", "[THINK]t</think>[/THINK]4", "t</think>", "4"),
    ],
)
def test_thinking_is_what_stands_between_its_tags(
    shown: str, written: str, thinking: str, answer: str
) -> None:
    assert divided(written, opened_by(shown))[:2] == (thinking, answer)
