# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prompt_files import character_tokenizer

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.rollout.prompts import (
    PromptLimits,
    PromptSet,
    PromptStream,
    check_rows,
    first_prompts,
)
from torchtitan.grpo.rollout.tables import open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec

CHARACTERS = "?\x00abcdefghij 0123456789:"
VOCABULARY = {c: i for i, c in enumerate(CHARACTERS)}
EOS = 1


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    """One token a character; the end of sequence is no special token of the tokenizer."""
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    model = tmp_path / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    return TextCodec(str(model), [EOS])


@pytest.fixture
def write(tmp_path: Path):
    def write_(rows: list[Any] | str) -> str:
        path = tmp_path / "prompts.jsonl"
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text)
        return str(path)

    return write_


def prompt_set(
    path: str, codec: TextCodec, max_tokens: int = 100, vocab_size: int = 100, **settings
) -> PromptSet:
    table = Prompts(path=path, **settings)
    rows = open_table(path, table.split, table.rename, table.column, "prompts.path", table.name)
    return PromptSet(rows, table, codec, PromptLimits(max_tokens, vocab_size), "prompts.path")


def stream(prompts: PromptSet, shuffle: bool = True):
    return PromptStream([prompts], seed=0, shuffle=shuffle)


def test_row_becomes_tokens_text_and_remaining_columns(codec: TextCodec, write):
    path = write([{"q": "abc", "answer": "cab", "level": 2}])
    prompts = prompt_set(path, codec, rename={"q": "prompt"}, template="{level}: {prompt}")
    prompt = stream(prompts).next()
    assert prompt.text == "2: abc"
    assert prompt.token_ids.tolist() == [VOCABULARY[c] for c in "2: abc"]
    assert prompt.token_ids.dtype == np.int32
    assert prompt.columns == {"answer": "cab", "level": 2}


def test_file_order_is_kept_without_shuffling(codec: TextCodec, write):
    prompts = prompt_set(write([{"prompt": c} for c in "cab"]), codec)
    source = stream(prompts, shuffle=False)
    assert [source.next().text for _ in range(4)] == ["c", "a", "b", "c"]


def test_long_prompts_are_left_out_and_counted(codec: TextCodec, write):
    prompts = prompt_set(write([{"prompt": "a"}, {"prompt": "a" * 9}]), codec, max_tokens=8)
    source = stream(prompts, shuffle=False)
    assert [source.next().group_id for _ in range(3)] == [0, 2, 4]
    assert [skipped.index for skipped in source.take_skipped()] == [1, 3]
    assert first_prompts(prompts, 0)[1] == 1


def test_set_without_a_short_prompt_is_refused(codec: TextCodec, write):
    prompts = prompt_set(write([{"prompt": "a" * 9}] * 3), codec, max_tokens=8)
    with pytest.raises(ValueError, match=r"prompts.path: none of the 3 prompts .* at most 8"):
        stream(prompts).next()
    with pytest.raises(ValueError, match="none of the first 2 prompts"):
        first_prompts(prompts, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "prompts.path: .* contains no prompts"),
        ("\n\n", "prompts.path: .* contains no prompts"),
        ('{"prompt": "a"}\n\n{"prompt": \n', r"prompts.jsonl:3: .*not JSON"),
        ('{"prompt": "a"}\n[1]\n', r"prompts.jsonl:2: .* got a list"),
        ('{"question": "a"}\n', r"prompts.jsonl:1: there is no column 'prompt'.*'question'"),
    ],
)
def test_bad_file_is_refused_with_its_line(codec: TextCodec, write, text: str, message: str):
    with pytest.raises(ValueError, match=message):
        check_rows(prompt_set(write(text), codec))


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"prompt": 3}, {}, "must be a string, or a list of messages"),
        ({"prompt": ""}, {}, "the prompt has no text"),
        ({"prompt": "a"}, {"template": "{question}"}, "prompts.template .* cannot be filled in"),
        ({"prompt": "a9"}, {"vocab_size": 10}, "the model's vocabulary has only 10 entries"),
        (
            {"prompt": [{"role": "user", "content": "a"}]},
            {"template": "{prompt}"},
            "string prompts",
        ),
    ],
)
def test_row_that_is_no_prompt_is_refused(codec: TextCodec, write, row, settings, message: str):
    prompts = prompt_set(write([row]), codec, **settings)
    with pytest.raises(ValueError, match=message):
        stream(prompts).next()


def test_saved_data_set_and_its_missing_split(codec: TextCodec, tmp_path: Path):
    import datasets

    rows = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    path = tmp_path / "saved"
    datasets.DatasetDict({"train": rows}).save_to_disk(str(path))
    prompt = stream(prompt_set(str(path), codec), shuffle=False).next()
    assert (prompt.text, prompt.columns) == ("a", {"answer": "1"})
    with pytest.raises(ValueError, match=r"prompts.path: .* split 'test'"):
        prompt_set(str(path), codec, split="test")
    with pytest.raises(ValueError, match="there is no column 'question'"):
        prompt_set(str(path), codec, column="question")


def test_data_set_with_several_configurations_is_opened_by_name(codec: TextCodec, tmp_path: Path):
    path = tmp_path / "several"
    path.mkdir()
    for name in ("main", "other"):
        (path / f"{name}.jsonl").write_text(json.dumps({"prompt": name[0]}) + "\n")
    configurations = [
        {"config_name": name, "data_files": f"{name}.jsonl"} for name in ("main", "other")
    ]
    (path / "README.md").write_text(f"---\nconfigs: {json.dumps(configurations)}\n---\n")
    for name in ("main", "other"):
        rows = open_table(str(path), "train", {}, "prompt", "prompts.path", name)
        assert rows.row(0) == {"prompt": name[0]}
    with pytest.raises(ValueError, match="configuration 'none' and split 'train'"):
        prompt_set(str(path), codec, name="none")


def test_path_must_be_given(codec: TextCodec):
    with pytest.raises(ValueError, match=r"prompts.path must be the path"):
        prompt_set("", codec)


def test_completion_is_decoded_without_its_end_of_sequence(codec: TextCodec):
    ids = [VOCABULARY["a"], VOCABULARY["b"], EOS]
    assert codec.decode(ids) == codec.decode(ids[:2])
    assert codec.decode([EOS]) == ""


def test_conversation_without_a_chat_template_is_refused(codec: TextCodec, write, tmp_path: Path):
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config))
    prompts = prompt_set(write([{"prompt": [{"role": "user", "content": "a"}]}]), codec)
    with pytest.raises(ValueError, match="no chat template"):
        stream(prompts).next()


def test_conversation_is_rendered_by_the_chat_template(codec: TextCodec, write, tmp_path: Path):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for m in messages %}{{ m.content }}:{% endfor %}"
        "{% if add_generation_prompt %}9{% endif %}",
    }
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "ab"}]
    prompt = stream(prompt_set(write([{"prompt": messages}]), codec)).next()
    assert prompt.text == messages
    assert prompt.token_ids.tolist() == [VOCABULARY[c] for c in "ab:9"]


def test_directory_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"model.hf_assets_path must contain a tokenizer.json"):
        TextCodec(str(tmp_path), [])


def test_a_prompt_of_too_many_characters_is_not_tokenized(codec: TextCodec, write, monkeypatch):
    path = write([{"prompt": "a" * 101}, {"prompt": "abc"}])
    prompts = prompt_set(path, codec, max_tokens=100)
    encoded = []
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda text: encoded.append(text) or encode(text))
    assert prompts.prompt(0, 0) is None
    assert encoded == [], "its tokenization would take hundreds of bytes for each character"
    assert "1: the prompt has 101 characters" in prompts.too_long_reason
    assert "100 tokens" in prompts.too_long_reason and "at most 100." in prompts.too_long_reason
    assert prompts.prompt(1, 1) is not None and encoded == ["abc"]
    assert prompts.prompt(0, 0) is None, "it stays left out"
