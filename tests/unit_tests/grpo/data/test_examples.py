# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import json
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_files import character_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from torchtitan.grpo.config import SFT, Prompts
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.supervised import ExampleStream
from torchtitan.grpo.rollout.prompts import row_check
from torchtitan.grpo.system.errors import DataError
from torchtitan.grpo.types import PromptProgress

CHARACTERS = "?$UAESabcdefghijklmnopqrstuvwxyz "
EOS, END_OF_TURN = CHARACTERS.index("$"), CHARACTERS.index("E")
TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A', 'system': 'S'}[m.role] }}"
    "{{ m.content }}E{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One token a character; ``E`` ends a turn, and ``$`` a text."""
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.add_special_tokens([AddedToken(c) for c in "$E"])
    folder = tmp_path_factory.mktemp("model")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def open_stream(model, tmp_path):
    def make(rows, *, max_tokens=20, position=0, vocab_size=50, prompts=None, **settings):
        path = tmp_path / "examples.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = JobConfig()
        config.sft = SFT(path=str(path), max_example_tokens=max_tokens, **settings)
        config.prompts = prompts or Prompts(shuffle=False)
        config.training.seq_len = 64
        described: Any = SimpleNamespace(
            path=model, eos_token_ids=(EOS, END_OF_TURN), vocab_size=vocab_size
        )
        return ExampleStream(config, described, str(path), "sft.path", PromptProgress(position))

    return make


def text(sample):
    parts = (sample.prompt_ids, sample.completion_ids)
    return "|".join("".join(CHARACTERS[i] for i in ids) for ids in parts)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return user(content) | {"role": "assistant"}


def test_strings_are_put_into_the_template_of_the_prompts_and_end(open_stream):
    prompts = Prompts(template="a {prompt} {extra}", shuffle=False)
    rows = [
        {"prompt": "b", "completion": " c", "extra": "x"},
        {"prompt": "b", "completion": "c$", "extra": "y"},
    ]
    stream = open_stream(rows, prompts=prompts)
    assert text(stream.next()) == "a b x| c$"
    assert text(stream.next()) == "a b y|c$"  # it has its end already


def test_chat_messages_go_through_the_chat_template_in_every_form(open_stream):
    rows = [
        {"prompt": [user("a")], "completion": "b"},
        {"prompt": [user("a")], "completion": [assistant("b")]},
        {"prompt": [user("a"), assistant("b")]},
        {"prompt": [user("a"), assistant("b") | {"tool_calls": None, "reasoning": "", "id": 7}]},
    ]
    stream = open_stream(rows)
    # The end of a turn is what the template writes, though the model's first end token is another.
    assert {text(stream.next()) for _ in rows} == {"UaEA|bE"}


def test_a_conversation_is_trained_on_each_turn_of_the_assistant(open_stream):
    rows = [{"messages": [user("a"), assistant("b"), user("c"), assistant("d"), assistant("e")]}]
    prompts = Prompts(system_prompt="s", shuffle=False)
    stream = open_stream(rows, column="messages", prompts=prompts)
    sample = stream.next()
    assert text(sample) == "SsEUaEA|bEUcEAdEAeE"
    assert learned(sample) == "bE....dEAeE", "messages that follow each other are one turn"
    assert sample.num_trained == 7 and stream.notes() == []
    described = stream.describe_first().replace(" ", "")
    assert described.startswith("itsfirst:18tokens,7ofthemtrained:'SsEUaEA'[trained:'bE']'UcEA'[")


def learned(sample):
    pairs = zip(sample.completion_ids, sample.sampled, strict=True)
    return "".join(CHARACTERS[i] if own else "." for i, own in pairs)


def test_messages_of_a_completion_are_learned_and_those_of_the_prompt_are_not(open_stream):
    said = [user("a"), assistant("b"), user("c")]
    rows = [{"prompt": said, "completion": [assistant("d"), user("e"), assistant("f")]}]
    sample = open_stream(rows).next()
    assert text(sample) == "UaEAbEUcEA|dEUeEAfE"
    assert learned(sample) == "dE....fE"


def test_what_the_template_does_not_print_is_said(open_stream):
    rows = [{"prompt": [user("a"), THOUGHT]}, {"prompt": [user("a"), assistant("b")]}]
    rows.append({"prompt": [user("a"), assistant("b") | {"function_call": {"name": "f"}}]})
    notes = open_stream(rows).notes()
    assert [note.partition(" of the assistant")[0] for note in notes] == [
        "sft.path: in 1 of the 3 examples that were tokenized, the chat template does not print "
        + what
        for what in ("function_call (write tool_calls)", "thinking")
    ]


def test_what_is_too_long_is_left_out_and_counted(open_stream):
    rows = [{"prompt": "a", "completion": "b" * n} for n in (1, 9, 8, 30)]
    rows.append({"prompt": "a" * 40, "completion": "b"})
    stream = open_stream(rows, max_tokens=10)
    assert [text(sample) for sample in stream.all()] == ["a|b$", "a|bbbbbbbb$"]
    assert stream.num_too_long >= 3
    with pytest.raises(DataError, match=r"sft\.path: none of the 5 examples .*at most 2 tokens"):
        open_stream(rows, max_tokens=2).next()
    with pytest.raises(DataError, match=r"Raise sft\.max_example_tokens") as refused:
        open_stream([{"prompt": "a" * 40, "completion": "b"}], max_tokens=10)
    assert "rollout." not in str(refused.value)


def test_a_stream_continues_another_one_at_its_position(open_stream):
    rows = [{"prompt": c, "completion": "x" * n} for n, c in enumerate("abcdefg", start=1)]
    shuffled = Prompts(shuffle=True)
    whole = open_stream(rows, prompts=shuffled, max_tokens=7)
    before = [text(whole.next()) for _ in range(8)]
    position, after = whole.position, [text(whole.next()) for _ in range(8)]
    resumed = open_stream(rows, prompts=shuffled, max_tokens=7, position=position)
    assert [text(resumed.next()) for _ in range(8)] == after
    assert set(before) == set(after)  # five of the seven rows fit
    assert len(set(before)) == 5
    assert before[:5] != after[:5]


THOUGHT = assistant("b") | {"reasoning_content": "c"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
CALLED = assistant("b") | {"tool_calls": [{"id": 1}]}
BAD_EXAMPLES = {
    "null_prompt": ({"prompt": None, "completion": "b"}, "must be a string, or a list"),
    "empty_completion": ({"prompt": "a", "completion": ""}, "must be a string that is not empty"),
    "no_completion": ({"prompt": "a"}, "there is no column 'completion'"),
    "number": ({"prompt": "a", "completion": 5}, "must be a string that is not empty"),
    "answer_alone": ({"prompt": [assistant("b")]}, "must have a message before"),
    "no_object": ([1], "must be a JSON object"),
    "of_the_user": ({"prompt": "a", "completion": [user("b")]}, "ends with one of the assistant"),
    "reasoning": ({"prompt": "a", "completion": [THOUGHT]}, "a single one with content alone"),
    "calls": ({"prompt": "a", "completion": [CALLED]}, "a single one with content alone"),
    "lost_calls": (
        {"prompt": [user("a"), CALLED | {"tool_calls": [CALL]}]},
        "tool_calls of the role",
    ),
    "image": ({"prompt": [user("a"), assistant([{"type": "image"}])]}, "a part of type 'image'"),
    "number_in_it": ({"prompt": [user("a")], "completion": [user(5), assistant("b")]}, "is 5"),
    "two_completions": ({"prompt": [user("a"), assistant("b")], "completion": "c"}, "as well"),
    "switched_off": ({"prompt": [user("a"), assistant("b") | {"weight": 0}]}, "its weight is 0"),
    "nothing": ({"prompt": [user("a")], "completion": []}, "must be a string that is not empty"),
}


@pytest.mark.parametrize("name", BAD_EXAMPLES)
def test_a_bad_example_is_found_when_the_file_is_opened(name, open_stream):
    row, message = BAD_EXAMPLES[name]
    fine = {"prompt": "a", "completion": "b"}
    with pytest.raises(DataError, match=rf"sft\.path: 1 of .*examples\.jsonl:9: .*{message}"):
        open_stream([fine] * 8 + [row, fine])


def test_a_tokenizer_of_another_model_is_refused(open_stream):
    with pytest.raises(DataError, match=r"token id \d+, but the model's vocabulary has only 20"):
        open_stream([{"prompt": "a", "completion": "z"}], vocab_size=20)


@pytest.mark.parametrize("name", ["null_prompt", "no_completion", "no_object", "calls"])
def test_a_bad_example_that_was_not_checked_is_left_out_and_counted(
    name, open_stream, monkeypatch, caplog
):
    monkeypatch.setattr(row_check, "FULL_CHECK_ROWS", 1)
    monkeypatch.setattr(row_check, "sample_rows", lambda num_rows: [0])
    fine = {"prompt": "a", "completion": "b"}
    stream = open_stream([fine] * 3 + [BAD_EXAMPLES[name][0], fine])
    assert [text(stream.next()) for _ in range(8)] == ["a|b$"] * 8
    assert (stream.num_unusable, stream.num_too_long, stream.position) == (2, 0, 10)
    assert caplog.text.count("first of the examples that cannot be used") == 1
    assert "examples.jsonl:4: " in caplog.text
