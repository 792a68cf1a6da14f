# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import json
from pathlib import Path
from typing import Any

import pytest
from prompt_files import byte_tokenizer, process_config
from tokenizers import Tokenizer

from torchtitan.grpo.config import Evaluation, Prompts
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.inputs import make_codec, open_held_out, open_prompts
from torchtitan.grpo.types import Prompt

# As Qwen3's template does, it opens and closes the thinking part itself if there is to be none.
TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""
USER = [{"role": "user", "content": "6*7?"}]
WORDY = [{"role": "system", "content": "Be wordy."}, *USER]
ANSWER = {"role": "assistant", "content": "42"}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
TYPO = {"chat_template_kwargs": {"enable_thinkin": False}}
TURN = "<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes with ChatML's tokens, and the template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(("<|im_start|>", "<|im_end|>", "<think>", "</think>"))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def opened(model: Path, tmp_path: Path):
    """Opens a row as a training prompt and as a held-out prompt; returns both with their text."""

    def open_(prompt: Any, **settings: Any) -> list[tuple[Prompt, str]]:
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"prompt": prompt}) + "\n")
        config = process_config(
            model,
            Prompts(path=str(file), **settings),
            evaluation=Evaluation(path=str(file)),
            eos_token_ids=[257],
            seq_len=512,
        )
        codec = make_codec(config)
        stream, _ = open_prompts(config, codec, [])
        prompts = [stream.next(), *open_held_out(config, codec, DropLog(None))["heldout"]]
        stream.close()
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        return [
            (p, tokenizer.decode(p.token_ids.tolist(), skip_special_tokens=False)) for p in prompts
        ]

    return open_


def test_variables_reach_the_template_in_training_and_in_evaluation(opened):
    for _, text in opened(USER):
        assert text == TURN
    for _, text in opened(USER, **QUIET):
        assert text == TURN + "<think>\n\n</think>\n\n"
    for _, text in opened(USER, chat_template_kwargs={"enable_thinking": True}):
        assert text == TURN


def test_a_system_prompt_stands_before_the_messages_and_rewards_see_it(opened):
    for prompt, text in opened(USER, system_prompt="Be brief."):
        assert text == SYSTEM + TURN
        assert prompt.text == [{"role": "system", "content": "Be brief."}, *USER]
    for prompt, text in opened(USER, system_prompt="\t \u3000"):
        assert text == TURN and prompt.text == USER


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("6*7?", {"system_prompt": "x"}, r"system_prompt needs .* chat messages, .* is a string"),
        ("6*7?", QUIET, r"rows\.jsonl:1: prompts\.chat_template_kwargs needs .* is a string"),
        (WORDY, {"system_prompt": "x"}, r"a system message of its own, 'Be wordy\.'\. Remove"),
        (USER, TYPO, r"sets 'enable_thinkin', which the chat template of .* does not read"),
        ([*USER, ANSWER], {}, r"rows\.jsonl:1: .* ends with a message of the assistant"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(opened, prompt, settings, message):
    with pytest.raises(ValueError, match=message):
        opened(prompt, **settings)


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("content", [" \n", None, [{"type": "text", "text": " "}]])
def test_an_empty_system_message_of_a_row_is_no_turn(opened, role, content):
    rows = [{"role": role, "content": content}, *USER]
    for prompt, rendered in opened(rows):
        assert rendered == TURN and prompt.text == USER
    for _, rendered in opened(rows, system_prompt="Be brief."):
        assert rendered == SYSTEM + TURN
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*the last message .* has no text"):
        opened(rows[:1])


@pytest.mark.parametrize(
    ("before", "settings"),
    [([], {}), (WORDY[:1], {}), ([*USER, ANSWER], {}), ([], {"system_prompt": "Be brief."}), ([], QUIET)],
)  # fmt: skip
def test_a_template_shapes_the_last_turn_of_the_user(opened, before, settings):
    for prompt, text in opened([*before, *USER], template="{prompt} Box it.", **settings):
        assert text.count("6*7? Box it.<|im_end|>") == text.count("Box it.") == 1
        assert prompt.text[-1] == {"role": "user", "content": "6*7? Box it."}


def test_a_template_needs_a_text_of_the_user(opened):
    with pytest.raises(ValueError, match="needs a text in a prompt's last turn"):
        opened([{"role": "system", "content": "Say a number."}], template="{prompt}!")
    parts = [{"type": "text", "text": "6*"}, {"type": "text", "text": "7?"}]
    for prompt, _ in opened([{"role": "user", "content": parts}], template="{prompt} Box it."):
        assert prompt.text[-1]["content"] == "6*7? Box it."
