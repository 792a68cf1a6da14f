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
    first_prompts,
)
from torchtitan.grpo.rollout.tables import open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec

CHARACTERS = "?\x00abcdefghij 0123456789:"
VOCABULARY = {c: i for i, c in enumerate(CHARACTERS)}
EOS, CHAT = 1, [{"role": "user", "content": "a"}]


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    """One token a character; the end of sequence is no special token of the tokenizer."""
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    model = tmp_path / "model"
    model.mkdir()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
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


def test_long_prompts_are_left_out_and_counted(codec: TextCodec, write):
    prompts = prompt_set(write([{"prompt": "a"}, {"prompt": "a" * 9}]), codec, max_tokens=8)
    source = stream(prompts, shuffle=False)
    assert [source.next().group_id for _ in range(3)] == [0, 2, 4]
    assert [skipped.index for skipped in source.take_skipped()] == [1, 3]
    assert first_prompts(prompts, 0)[1] == 1
    with pytest.raises(ValueError, match=r"prompts.path: none of the first 2 prompts"):
        first_prompts(prompt_set(write([{"prompt": "a" * 9}] * 3), codec, max_tokens=8), 2)


def test_a_row_a_path_and_a_folder_without_what_is_needed_are_refused(codec, write, tmp_path: Path):
    for row, settings, message in (
        ({"prompt": "a9"}, {"vocab_size": 10}, "the model's vocabulary has only 10 entries"),
        ({"prompt": CHAT}, {"template": "{prompt}"}, "string prompts"),
        ({"prompt": CHAT}, {}, "no chat template"),
    ):
        with pytest.raises(ValueError, match=message):
            stream(prompt_set(write([row]), codec, **settings)).next()
    with pytest.raises(ValueError, match=r"prompts.path: .* contains no prompts"):
        prompt_set(write("\n\n"), codec)
    with pytest.raises(ValueError, match=r"prompts.path must be the path"):
        prompt_set("", codec)
    with pytest.raises(ValueError, match=r"model.hf_assets_path must contain a tokenizer.json"):
        TextCodec(str(tmp_path), [])


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


TOOLED = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "cab"}}]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": CHAT, "tools": TOOLS}, "caba:"),
        ({"prompt": CHAT, "tools": json.dumps(TOOLS)}, "caba:"),
        ({"prompt": CHAT, "tools": None}, "a:"),
        ({"prompt": CHAT, "tools": []}, "a:"),
        ({"prompt": "a", "tools": "calculator"}, "a"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "b"}, "c"]}]}, "bc:"),
        ({"prompt": CHAT, "tools": "null"}, "a:"),
        ({"prompt": CHAT, "tools": "[]"}, "a:"),
        ({"prompt": CHAT, "image_name": "python:3.11", "video_id": "b"}, "a:"),
        ({"prompt": "a", "image": 7, "video": None, "audio": []}, "a"),
    ],
)
def test_tools_and_text_parts_are_shown_to_the_template(row, text, codec: TextCodec, write):
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TOOLED}
    (codec._path / "tokenizer_config.json").write_text(json.dumps(settings))
    prompt = stream(prompt_set(write([row]), TextCodec(str(codec._path), [EOS]))).next()
    assert prompt.token_ids.tolist() == [VOCABULARY[c] for c in text]
    assert prompt.columns == {key: row[key] for key in row if key != "prompt"}
    contents = prompt.text if isinstance(prompt.text, str) else prompt.text[0]["content"]
    assert contents == text.removeprefix("cab").removesuffix(":"), "as reward functions read it"
