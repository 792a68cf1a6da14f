# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import json
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from prompt_files import byte_tokenizer

from torchtitan.grpo.rollout import chat_template
from torchtitan.grpo.rollout.agents.transcript import Context, Transcript
from torchtitan.grpo.rollout.chat_template import LeftOut
from torchtitan.grpo.rollout.model_match import prompt_notes
from torchtitan.grpo.rollout.tokenizer import TextCodec

END = 256  # <end>
ALL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
OPENS = "{% if add_generation_prompt %}<a>{% endif %}"
ONLY = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"

USER = {"role": "user", "content": "2 + 3?"}
SYSTEM = {"role": "system", "content": "Be brief."}
TURN = {"role": "assistant", "content": "5"}
TOOL = {"role": "tool", "content": "5", "tool_call_id": "1"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "3"}]}


@pytest.fixture
def make(tmp_path: Path):
    def make_(template: str, date: str = "") -> TextCodec:
        tokenizer = byte_tokenizer(["<end>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return TextCodec(str(tmp_path), [END], date=date)

    return make_


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (ONLY, [SYSTEM, USER], r"is said by the role 'system' in message 1 of 2"),
        (ONLY, [USER, TURN, TOOL], r"is said by the role 'tool' in message 3 of 3"),
        (ONLY, [USER, CALLS, USER], r"the tool_calls of the role 'assistant' in message 2"),
        ("{{ messages[-1].content }}", [USER, TURN, USER], r"the role 'user' in message 1 of 3"),
        ("{{ messages[0].content }}", [USER, TURN], r"the role 'assistant' in message 2 of 2"),
        (ALL.replace("m.content", "m.content[:99]"), [USER], r"leaves out part of .* 'user'"),
        (ALL.replace("m.content", "m.content.split('\\n')[0]"), [USER], r"leaves out part of"),
        (ALL.replace("m.content", "m.content|length"), [USER], r"what is said by the role 'user'"),
        (ALL.replace("m.content", "m.content[0].text"), [PARTS], r"leaves out part of"),
        ("2 + 3? Be brief." + OPENS, [SYSTEM, USER], r"the role 'system' in message 1"),
    ],
)
def test_a_message_that_the_template_does_not_print_is_refused_with_its_role(
    make, template, messages, message
):
    codec = make(template)
    with pytest.raises(LeftOut, match=message):
        codec.encode_chat(messages)
    with pytest.raises(LeftOut, match=message):
        codec.template.render(messages)


MERGED = (
    "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{{ s if loop.first }} {{ m.content }}{% endfor %}"
)
FAIR = {
    "all": (ALL, [SYSTEM, USER, TURN, TOOL]),
    "merged": (MERGED, [SYSTEM, USER]),
    "on one line": (ALL.replace("m.content", "m.content|replace('\\n', ' ')"), [SYSTEM, USER]),
    "as JSON": (ALL.replace("m.content", "m.content|tojson"), [USER, TURN, TOOL]),
    "thinking": (
        ALL.replace("m.content", "m.content.split('</think>')[-1]"),
        [USER, {"role": "assistant", "content": "<think>2 + 3</think>5"}, USER],
    ),
    "parts": (ALL.replace("m.content", "m.content|map(attribute='text')|join"), [PARTS]),
    "calls": ("{% for m in messages %}{{ m|tojson }}{% endfor %}", [USER, CALLS, TOOL]),
    "nothing said": (ONLY, [USER, {"role": "assistant", "content": ""}, USER]),
}


@pytest.mark.parametrize("name", FAIR)
def test_templates_that_print_everything_in_their_own_way_are_used(make, name):
    template, messages = FAIR[name]
    assert make(template).encode_chat(messages)


def test_a_template_that_prints_only_the_last_messages_is_found_as_a_conversation_grows(make):
    codec = make("{% for m in messages[-5:] %}{{ m.content }}{% endfor %}")
    codec.template.render([USER, TURN, USER, TURN, USER])
    codec.template.render([*[USER, TURN] * 4, USER])  # of known pairs, and not twice as long
    with pytest.raises(LeftOut, match=r"the role 'user' in message 1 of 11"):
        codec.template.render([*[USER, TURN] * 5, USER])


def test_a_template_that_refuses_artificial_text_is_still_asked_about_other_messages(make):
    refusing = (
        "{% if 'qzv' in messages[0].content and messages|length == 1 %}{{ 1 / 0 }}{% endif %}"
    )
    codec = make(refusing + ONLY)
    for _ in range(2):
        assert codec.template.render([USER])
    with pytest.raises(LeftOut, match="the role 'system'"):
        codec.template.render([SYSTEM, USER])


@pytest.mark.parametrize("role", ["tool", "critic"])
def test_a_reply_of_an_environment_that_would_vanish_is_refused(make, role):
    codec = make(ONLY)
    reply = [{"role": role, "content": "5"}]
    with pytest.raises(LeftOut, match=rf"the role '{role}' in message 3 of 3"):
        codec.reply_text(reply, [1])
    with pytest.raises(LeftOut, match=rf"the role '{role}' in message 3 of 3"):
        transcript = Transcript(codec, templated=True)
        turn = transcript.turn(Context([2], "2 + 3?"), [1])
        transcript.context_behind(turn, [USER, TURN], reply)


def test_messages_are_written_behind_a_turn_as_the_chat_template_would(make):
    codec = make(ALL + OPENS.replace("<a>", "<assistant>"))
    whole = codec.encode_chat([USER, TURN, TOOL, USER])
    opened, said = codec.encode_chat([USER]), codec.encode("5")
    # Where the model did not write the end of its turn, the template does.
    for turn in ([*said, END], said):
        behind = codec.reply_text([TOOL, USER], turn)
        assert opened + turn + codec.encode_continuation(behind) == whole


DATED = "{{ strftime_now('%d %b %Y') }}|" + ALL
DATES = {
    "plain": DATED,
    "in a macro": "{% macro d() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ d() }}" + ALL,
    "in a condition": "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    + ALL,
}


@pytest.mark.parametrize("name", DATES)
def test_the_date_is_that_of_the_first_start_on_every_day(make, name):
    first = make(DATES[name], "2031-12-31T23:59:58")
    text = first.template.render([USER])
    assert "31 Dec 2031" in text
    assert make(DATES[name], "2031-12-31T23:59:58").encode_chat([USER]) == first.encode_chat([USER])
    assert "01 Jan 2032" in make(DATES[name], "2032-01-01T00:00:02").template.render([USER])
    assert "31 Dec 2031" in first.template.render([USER, TURN, USER])
    assert "2031-12-31" in " ".join(prompt_notes(first, is_chat=True))


def test_without_a_date_of_the_run_it_is_that_of_the_first_rendering(make):
    before = datetime.now()
    codec = make("{{ strftime_now('%Y-%m-%dT%H:%M:%S.%f') }}" + ALL)
    first, second = (codec.template.render([USER])[:26] for _ in range(2))
    assert first == second and before <= datetime.fromisoformat(first) <= datetime.now()


LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
ENDS = "{% endfor %}" * 3
LIMITS = {
    "loops": (LOOP + "{{ '' }}" + ENDS, "more than .* s of processor time to render"),
    "repeats": ("{{ 'a' * 10**10 }}", "more than .* GiB of memory to render"),
    "pads": ("{{ '%9999999999d' % 1 }}", "more than .* GiB of memory to render"),
    "prints much": ("{{ 'a' * 10**7 }}", "more than .* characters of text to render"),
    "recurs": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_template_is_ended_at_a_limit_and_the_next_one_is_rendered(make, name, monkeypatch):
    template, limit = LIMITS[name]
    with monkeypatch.context() as limited:
        limited.setattr(chat_template, "_CPU_SECONDS", 0.5 if name == "loops" else 10.0)
        limited.setattr(chat_template, "_MEMORY_BYTES", 2**27)
        with pytest.raises(ValueError, match=rf"chat template .*{limit}|cannot render .*{limit}"):
            make(ALL + template).encode_chat([USER])
    assert make(ALL).template.render([USER]) == "<user>2 + 3?<end>"


def test_what_only_python_holds_reaches_the_template_and_comes_back(make):
    codec = make(ALL.replace("m.content", "m.content ~ m.number"))
    odd = {"role": "user", "content": "half: \ud83d", "number": 2**70}
    assert codec.template.render([odd]) == f"<user>half: \ud83d{2**70}<end>"


def test_a_child_that_somebody_else_ends_is_started_again(make):
    codec = make(ALL)
    assert codec.template.render([USER]) == "<user>2 + 3?<end>"
    (child,) = (
        p for p in psutil.Process().children() if "template_renderer" in " ".join(p.cmdline())
    )
    child.kill()
    psutil.wait_procs([child], 10)
    assert codec.template.render([USER]) == "<user>2 + 3?<end>"


def test_a_template_that_prints_something_else_each_time_is_refused(make):
    numbers = "{{ range(99)|random }}" * 20
    with pytest.raises(ValueError, match="must render the same messages to the same text"):
        make(numbers + ALL).encode_chat([USER])


@pytest.mark.parametrize(
    ("opening", "ends"),
    [("<a>\n", None), ("<a><end>\n", "refused"), ("<end>", "refused"), ("", "told")],
)
def test_an_end_token_behind_the_opened_turn_is_refused_and_without_one_told(make, opening, ends):
    codec = make(
        ALL + "{% if add_generation_prompt %}" + "{{ " + repr(opening) + " }}" + "{% endif %}"
    )
    if ends == "refused":
        with pytest.raises(ValueError, match="adds for add_generation_prompt ends with '<end>'"):
            codec.encode_chat([USER])
    else:
        codec.encode_chat([USER])
        assert len(list(prompt_notes(codec, is_chat=True))) == (ends == "told")
