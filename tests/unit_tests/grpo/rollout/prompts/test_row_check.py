# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_files import character_tokenizer

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.rewards.gold_values import gold_judge
from torchtitan.grpo.rollout.prompts import (
    PromptLimits,
    PromptSet,
    check_rows,
    first_prompts,
    row_check,
)
from torchtitan.grpo.rollout.tables import open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant', 'tool') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}{{ m.content }}{% endfor %}"
)
USER = {"role": "user", "content": "a"}


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    model = tmp_path / "model"
    model.mkdir()
    character_tokenizer().save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return TextCodec(str(model), [1])


def open_set(path: Path, codec: TextCodec, max_tokens: int = 8, **settings: Any) -> PromptSet:
    table = Prompts(path=str(path), **settings)
    rows = open_table(str(path), "train", table.rename, table.column, "prompts.path")
    return PromptSet(rows, table, codec, PromptLimits(max_tokens, 100), "prompts.path")


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def row(prompt: Any) -> dict[str, Any]:
    return {"prompt": prompt, "answer": "1"}


def asked(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


TEXT = {"type": "text", "text": "a"}
FINE, FINE_CHAT = row("a"), row([USER])

BAD_ROWS: dict[str, tuple[Any, str]] = {
    "null": (row(None), "must be a string, or a list of messages .*got None"),
    "empty": (row(""), "the prompt has no text"),
    "unseen": (row("\u200b\ufeff"), "the prompt has no text"),
    "empty_part": (row([USER | {"content": [{"text": " "}]}]), "last message .* no text"),
    "image": (
        row(asked([{"type": "image", "text": None}])),
        r"message 1 .user. has a part of .*'image'",
    ),
    "image_url": (
        row(asked([TEXT, {"type": "image_url", "image_url": {}}])),
        "part of .*'image_url'",
    ),
    "audio": (row(asked([{"type": "input_audio", "input_audio": {}}])), "part of .*'input_audio'"),
    "video": (
        row([USER, {"role": "tool", "content": [{"type": "video"}]}]),
        ".tool. has .*'video'",
    ),
    "file": (row(asked([{"type": "file", "text": "a"}])), "part of type 'file'"),
    "image_in_text": (row(asked([TEXT | {"image": "a.png"}])), "part of type 'image'"),
    "images_beside": (row([USER | {"images": ["a.png"]}]), "message 1 .user. has 'images'"),
    "images_column": (row([USER]) | {"images": [{"bytes": "x"}]}, "column 'images' may belong"),
    "image_beside_text": (
        row("a <image> b") | {"image": {"bytes": "x"}},
        "column 'image' may belong",
    ),
    "images_beside_text": (row("a") | {"images": ["a"]}, "column 'images' may belong"),
    "image_file": (row([USER]) | {"image": "cat.PNG"}, "column 'image' may belong"),
    "image_of_a_place": (row(asked("<image>a")) | {"image": "train/0001"}, "column 'image' may"),
    "video_file": (row("a") | {"video": "x.mp4"}, "column 'video' may belong"),
    "audio_address": (row("a") | {"audio_url": "https://a/b"}, "column 'audio_url' may belong"),
    "numbered_image": (row("a") | {"image_1": {"bytes": "x"}}, "column 'image_1' may belong"),
    "second_image": (row("a") | {"audio": 3, "image": [1]}, "column 'image' may belong"),
    "pixels": (row([USER]) | {"pixel_values": [[0.5]]}, "column 'pixel_values' may belong"),
    "pixels_of_a_message": (row([USER | {"pixel_values": [1]}]), "has 'pixel_values'"),
    "part_of_numbers": (row(asked([1])), "part of type <class 'int'>"),
    "tools": (row([USER]) | {"tools": "calculator"}, "column 'tools' .* got 'calculator'"),
    "tool_names": (
        row([USER]) | {"tools": ["add"]},
        "column 'tools' .* must be a list of functions",
    ),
    "tools_not_shown": (row([USER]) | {"tools": [{"name": "add"}]}, "does not print"),
    "number": (row(12), "must be a string, .*got 12"),
    "dictionary": (row({"text": "a"}), "must be a string, .*got {'text'"),
    "list_of_text": (row(["a"]), r"must be a string, .*got \['a'\]"),
    "no_column": ({"question": "a", "answer": "1"}, "there is no column 'prompt'"),
    "no_object": ("[1, 2]", "must be a JSON object, got a list"),
    "no_json": ('{"prompt": "a"', "is not JSON"),
    "no_messages": (row([]), r"must be a string, .*got \[\]"),
    "empty_message": (row([{}]), r"got \[\{\}\]"),
    "no_content": (row([{"role": "user"}]), "role and content, got"),
    "null_content": (row([USER | {"content": None}]), "message 1 .user. is None"),
    "blank_content": (row([USER | {"content": " "}]), "last message .* no text"),
    "null_role": (row([USER | {"role": None}]), "message 1 has the role None"),
    "role_of_template": (row([USER | {"role": "usr"}]), "no role usr"),
    "answered": (row([USER, {"role": "assistant", "content": "b"}]), "ends with a message"),
    "null_answer": ({"prompt": "a", "answer": None}, "the column 'answer' is null"),
    "no_answer": ({"prompt": "a"}, "the column 'answer' is missing"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("checked", ["in_full", "evaluated", "tokenized_in_part"])
def test_one_bad_row_at_the_end_is_found(name, checked, codec, tmp_path: Path, monkeypatch):
    bad, message = BAD_ROWS[name]
    if checked == "tokenized_in_part":
        monkeypatch.setattr(row_check, "TOKENIZED_ROWS", 2)
    path = lines(tmp_path / "p.jsonl", [FINE, FINE_CHAT] * 4 + [bad] + [FINE] * 3)
    prompts, judge = open_set(path, codec), gold_judge(["exact_match"])
    with pytest.raises(
        ValueError, match=rf"prompts.path: 1 of .* The first: .*p.jsonl:9: .*{message}"
    ):
        first_prompts(prompts, 0, judge) if checked == "evaluated" else check_rows(prompts, judge)


@pytest.mark.parametrize("form", ["parquet", "data_set"])
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("prompt", None, "got None"),
        ("answer", None, "'answer' is null"),
        ("answer", float("nan"), "'answer' is NaN"),
    ],
)
def test_a_bad_row_of_a_table_with_types_is_found(form, column, value, message, codec, tmp_path):
    import datasets

    gold = 1.0 if isinstance(value, float) else "1"
    rows = [{"prompt": "a", "answer": gold} for _ in range(700)]
    rows[699] = rows[699] | {column: value}
    path = tmp_path / ("p.parquet" if form == "parquet" else "saved")
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    with pytest.raises(ValueError, match=f"1 of the 700 rows .* row 699: .*{message}"):
        check_rows(open_set(path, codec), gold_judge(["boxed_math"]))


FINE_ROWS = {
    "call_of_a_tool": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}, USER],
    "silent_tool": [USER, {"role": "assistant", "content": "b"}, {"role": "tool", "content": ""}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    "null_image": [{"role": "user", "content": [{"type": "text", "text": "a", "image": None}]}],
    "text_parts": [{"role": "user", "content": ["a", {"text": "b", "type": None}]}, USER],
    "later_turn": [USER, {"role": "assistant", "content": "b"}, USER],
    "marked": "\ufeffa",
}


@pytest.mark.parametrize("name", FINE_ROWS)
def test_rows_that_are_unusual_and_right_pass(name, codec, tmp_path: Path):
    path = lines(tmp_path / "p.jsonl", [FINE, row(FINE_ROWS[name])])
    checked = check_rows(open_set(path, codec, max_tokens=200), gold_judge(["exact_match"]))
    assert (checked.num_rows, checked.num_checked, checked.num_fitting) == (2, 2, 2)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{prompt} {x}", "x is null in this row"),
        ("{x!r}{prompt}", "x is null"),
        ("{z}{prompt}", "z is NaN"),
        ("{prompt}{none}", "KeyError"),
        ("{blank}", "the prompt has no text"),
    ],
)
def test_a_template_prints_no_missing_value(template, message, codec, tmp_path: Path):
    values = FINE | {"x": None, "y": [None], "z": float("nan"), "blank": " "}
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([values]), path)
    with pytest.raises(ValueError, match=message):
        check_rows(open_set(path, codec, template=template))


@pytest.mark.parametrize("functions", [["my.py:f"], [], ["think_answer_tags"]])
def test_answers_that_no_built_in_reward_compares_with_may_be_null(functions, codec, tmp_path):
    path = lines(tmp_path / "p.jsonl", [FINE, {"prompt": "a", "answer": None}])
    assert check_rows(open_set(path, codec), gold_judge(functions)).num_fitting == 2


def test_a_larger_set_is_sampled_and_says_so(codec, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(row_check, "FULL_CHECK_ROWS", 8999)
    rows: list[Any] = [FINE] * 9000
    sampled = row_check.sample_rows(9000)
    assert sampled[:1024] == list(range(1024)) and sampled[-1] == 8999
    bad = min(set(range(9000)) - set(sampled))
    rows[bad] = "{}"
    prompts = open_set(lines(tmp_path / "p.jsonl", rows), codec)
    checked = check_rows(prompts)
    assert checked.describe().startswith(f"{len(sampled):,} of 9,000 rows checked, and a bad one")
    rows[8999] = "{}"
    with pytest.raises(ValueError, match=r"p.jsonl:9000: there is no column"):
        check_rows(open_set(lines(tmp_path / "p.jsonl", rows), codec))


@pytest.mark.parametrize(("long", "warns"), [(4, False), (6, True)])
def test_prompts_that_do_not_fit_are_counted_and_most_of_them_are_a_warning(
    long, warns, codec, tmp_path: Path
):
    rows = [FINE] * (10 - long) + [row("a" * 9)] * long
    prompts = open_set(lines(tmp_path / "p.jsonl", rows), codec)
    assert check_rows(prompts).describe() == f"all 10 rows checked; {10 - long} of 10 prompts fit"
    warnings = list(prompts.notes())
    assert bool(warnings) == warns
    if warnings:
        assert f"only {10 - long} of 10 prompts of {prompts.path} fit: at most 8" in warnings[0]
        assert "Raise prompts.max_prompt_tokens" in warnings[0]


@pytest.mark.parametrize(
    ("prompt", "template", "unread"),
    [
        ("a\n?b", None, r"'\n'"),
        ("aX", None, "'X'"),
        ("é", None, "'é'"),
        (asked("aZ"), None, "'Z'"),
        ("a", "{prompt}\nY", r"'\n', 'Y'"),
        ("a 1:", None, ""),
        (asked("ab"), None, ""),
    ],
)
def test_text_without_a_token_is_named(prompt, template, unread, codec, tmp_path: Path):
    codec = TextCodec(str(tmp_path / "model"), [1])
    rows = [row("a"), row(prompt), row(prompt)]
    prompts = open_set(lines(tmp_path / "p.jsonl", rows), codec, template=template)
    check_rows(prompts)
    place = f"{tmp_path / 'p.jsonl'}:{1 if template else 2}"
    known = f"prompts.path: the tokenizer has no token for {unread} in {place}, and"
    assert [note.startswith(known) for note in prompts.notes()] == [True] * bool(unread)


@pytest.mark.parametrize("prompt", [asked("a"), [{"role": "user", "content": "a", "x": 1}]])
def test_each_row_with_a_fault_that_tokenizing_shows_is_counted(prompt, codec, tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [row("a"), *[row(prompt) | {"tools": tools}] * 5]
    prompts = open_set(lines(tmp_path / "p.jsonl", rows), codec)
    with pytest.raises(ValueError, match=r"5 of the 6 rows .* The first: .*p.jsonl:2: column 'to"):
        check_rows(prompts)


def test_a_check_that_takes_long_says_how_far_it_has_come(codec, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(row_check, "_PROGRESS_SECONDS", 0.0)
    said, path = [], lines(tmp_path / "p.jsonl", [FINE] * 3)
    check_rows(open_set(path, codec), say=said.append)
    assert said[0] == f"prompts.path: 3 of 3 rows of {path} are read."
    assert said[-1] == f"prompts.path: 3 of 3 rows of {path} are tokenized."
