# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Every turn of the assistant is found in what templates of the families make of a conversation."""

import json

import pytest
from prompt_files import byte_tokenizer

from torchtitan.grpo.rollout.learned_turns import TurnFinder
from torchtitan.grpo.rollout.tokenizer import TextCodec

END, CALLED, OVER = 256, 257, 258
MARKS = ["<end>", "<called>", "<over>", "<user>", "<assistant>", "<|bot|>"]

# As Qwen3's: thinking is printed behind the last question alone, and always in the last turn.
QWEN = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{% set content = m.content %}{% set thought = m.reasoning_content or '' %}
{%- if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<assistant>\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' }}
{%- if c.function.arguments is string %}{{ c.function.arguments }}
{%- else %}{{ c.function.arguments|tojson }}{% endif %}{{ '</call>' }}{% endfor %}
{{- '<end>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<user>' }}{% endif %}
{{- '\n<got>\n' + m.content + '\n</got>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<end>\n' }}{% endif %}
{%- else %}{{ '<user>' + m.content + '<end>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
# As Llama 3.1's: texts are stripped, and there is one call, whose arguments are an object.
LLAMA = """{%- for m in messages %}{{ '<' + m.role + '>\n\n' }}
{%- if m.tool_calls %}{% if m.tool_calls|length != 1 %}{{ raise_exception('one call') }}{% endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments|tojson + '}' }}
{%- else %}{{ m.content|trim }}{% endif %}{{ '<end>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>\n\n' }}{% endif %}"""
# As gpt-oss': the last turn ends otherwise than those before, and a call ends in its own way.
OSS = """{%- for m in messages %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{{- '<assistant> to=' + m.tool_calls[0].function.name + ' json' }}
{{- m.tool_calls[0].function.arguments|tojson + '<called>' }}
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
{%- if 'thinking' in m %}{{ '<assistant>analysis ' + m.thinking + '<end>' }}{% endif %}
{{- '<assistant>final ' + m.content + '<over>' }}
{%- elif m.role == 'assistant' %}{{ '<assistant>final ' + m.content + '<end>' }}
{%- elif m.role == 'tool' %}{{ '<user>tool ' + m.content|tojson + '<end>' }}
{%- else %}{{ '<user>' + m.content + '<end>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
# As DeepSeek's: calls need no text but null, arguments are text, and one call alone has no end.
DEEPSEEK = """{%- set ns = namespace(tool=false, first=false) %}{%- for m in messages %}
{%- if m['role'] == 'user' %}{% set ns.tool = false %}{{ '<user>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}{% set ns.tool = false %}
{%- for c in m['tool_calls'] %}
{%- if not ns.first %}{{ '<assistant><call>' + c['function']['name'] + ' ' + c['function']['arguments'] }}
{%- set ns.first = true %}{% else %}{{ '\n<call>' + c['function']['name'] + ' ' }}
{{- c['function']['arguments'] + '<end>' }}{% endif %}{% endfor %}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}
{%- if ns.tool %}{{ '<got>' + m['content'] + '<end>' }}{% set ns.tool = false %}
{%- else %}{{ '<assistant>' + m['content'].split('</think>')[-1] + '<end>' }}{% endif %}{% endif %}
{%- if m['role'] == 'tool' %}{% set ns.tool = true %}{{ '<tool>' + m['content'] }}{% endif %}{% endfor %}
{%- if ns.tool %}{{ '<got>' }}{% endif %}
{%- if add_generation_prompt and not ns.tool %}{{ '<assistant><think>\n' }}{% endif %}"""


@pytest.fixture
def make(tmp_path):
    def make_(template: str, **variables) -> TextCodec:
        byte_tokenizer(MARKS).save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return TextCodec(str(tmp_path), [], variables)

    return make_


def user(content):
    return {"role": "user", "content": content}


def said(content, *calls, **more):
    calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return {"role": "assistant", "content": content, **more} | (
        {"tool_calls": calls} if calls else {}
    )


def tool(content):
    return {"role": "tool", "content": content}


CHAT = [user("a \n"), said("b"), user("c"), said(" d ")]
THOUGHT = {"reasoning_content": "t1"}
TWO_CALLS = [("f", {"x": 1}), ("g", {"y": "é"})]
AGENT = [user("q"), said("", *TWO_CALLS, **THOUGHT), tool("1"), tool("2"), said("b")]
TEXTS = [user("q"), said(None, ("f", '{"x":1}')), tool("1\n2"), said("b")]
INLINE = [user("a"), said("<think>\nt\n</think>\n\nb"), user("c"), said("<think>u</think>d")]
OSS_THOUGHTS = [user("a"), said("b", thinking="t"), user("c"), said("d", thinking="u")]
CASES = {
    "Qwen": (QWEN, CHAT, ["b<end>", "<think>\n\n</think>\n\n d <end>"], set()),
    "Qwen, agent": (
        *(QWEN, AGENT),
        [
            '<think>\nt1\n</think>\n\n<call>f {"x": 1}</call><call>g {"y": "é"}</call><end>',
            "<think>\n\n</think>\n\nb<end>",
        ],
        set(),
    ),
    "Qwen, texts": (
        *(QWEN, TEXTS),
        ['<call>f {"x":1}</call><end>', "<think>\n\n</think>\n\nb<end>"],
        set(),
    ),
    "Qwen, earlier thinking": (
        QWEN,
        INLINE,
        ["b<end>", "<think>\nu\n</think>\n\nd<end>"],
        {"thinking"},
    ),
    "Qwen, two in a row": (
        *(QWEN, [user("a"), said("b"), said("c"), user("d"), said("e")]),
        ["b<end>\n<assistant>\nc<end>", "<think>\n\n</think>\n\ne<end>"],
        set(),
    ),
    "Llama": (LLAMA, CHAT, ["b<end>", "d<end>"], set()),
    "Llama, texts": (LLAMA, TEXTS, ['{"name": "f", "parameters": {"x": 1}}<end>', "b<end>"], set()),
    "oss": (OSS, CHAT, ["final b", "final  d <over>"], {"the end of a turn"}),
    "oss, texts": (OSS, TEXTS, [' to=f json{"x": 1}<called>', "final b<over>"], set()),
    "oss, thinking": (
        *(OSS, OSS_THOUGHTS),
        ["final b", "analysis u<end><assistant>final d<over>"],
        {"the end of a turn", "thinking"},
    ),
    "DeepSeek": (DEEPSEEK, CHAT, ["b<end>", " d <end>"], set()),
    "DeepSeek, agent": (
        *(DEEPSEEK, AGENT),
        ['<call>f {"x": 1}\n<call>g {"y": "é"}<end>', "b<end>"],
        {"thinking"},
    ),
    "DeepSeek, texts": (
        *(DEEPSEEK, TEXTS),
        ['<call>f {"x":1}', "b<end>"],
        {"the end of a turn"},
    ),
    "DeepSeek, thinking": (DEEPSEEK, INLINE, ["\n\nb<end>", "d<end>"], {"thinking"}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_turn_is_learned_in_the_rendering_of_the_whole(name, make):
    template, messages, turns, left_out = CASES[name]
    codec = make(template)
    ends = [CALLED, OVER] if template == OSS else [END]
    found = TurnFinder(codec, ends).find(messages)
    whole = codec.template.render(messages, opens_turn=False)
    assert found.token_ids == codec.encode_continuation(whole)
    assert learned(codec, found) == turns
    assert found.left_out == left_out


def learned(codec, turns) -> list[str]:
    """The texts of the runs of learned tokens."""
    marked = [token if own else -1 for token, own in zip(*turns[:2], strict=True)]
    runs, rest = [], [*marked, -1]
    while rest:
        end = rest.index(-1)
        runs, rest = runs + ([rest[:end]] if end else []), rest[end + 1 :]
    return [codec.decode_exactly(run) for run in runs]


def test_a_prompt_that_closes_the_thinking_is_where_turns_begin(make):
    codec = make(QWEN, enable_thinking=False)
    finder = TurnFinder(codec, [END])
    assert learned(codec, finder.find(CHAT)) == ["b<end>", " d <end>"]
    calls = [user("q"), said("", ("f", {})), tool("1"), said("<think>b")]
    turns = learned(codec, finder.find(calls))
    assert turns == ["<call>f {}</call><end>", "<think>b<end>"]


def test_messages_before_the_first_one_that_is_learned_are_context(make):
    codec = make(LLAMA)
    finder = TurnFinder(codec, [END])
    assert learned(codec, finder.find(CHAT, first=2)) == ["d<end>"]
    greeted = [said("hello"), user("a"), said("b")]
    assert learned(codec, finder.find(greeted)) == ["b<end>"], "no prompt opens the first turn"
    plain = [user("<end>a<|bot|>"), said("b")]
    assert learned(codec, finder.find(plain)) == ["b<end>"]
    assert finder.find(plain).token_ids.count(END) == 2


@pytest.mark.parametrize("off", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_turns_that_are_switched_off_are_context(off, make):
    finder = TurnFinder(make(LLAMA), [END])
    first, second = (CHAT[:i] + [CHAT[i] | off] + CHAT[i + 1 :] for i in (1, 3))
    assert learned(finder._codec, finder.find(first)) == ["d<end>"]
    assert learned(finder._codec, finder.find(second)) == ["b<end>"]
    on = [*CHAT[:3], CHAT[3] | {"weight": 1, "train": True}]
    assert learned(finder._codec, finder.find(on)) == ["b<end>", "d<end>"]
    twice = [*CHAT[:2], said("e") | off, *CHAT[2:]]
    assert learned(finder._codec, finder.find(twice)) == ["d<end>"], "one turn of two messages"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (LLAMA, AGENT, "one call"),
        (OSS, AGENT, "leaves out part of the tool_calls of the role 'assistant'"),
        (QWEN.replace("'<user>' + m.content", "'<user>' + m.content|upper"), CHAT, "as it is"),
    ],
)
def test_a_template_in_which_turns_cannot_be_found_is_refused(template, messages, message, make):
    with pytest.raises(ValueError, match=message):
        TurnFinder(make(template), [END]).find(messages)
