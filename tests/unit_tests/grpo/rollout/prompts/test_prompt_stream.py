# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_files import character_tokenizer

from torchtitan.grpo.config import Prompts
from torchtitan.grpo.rollout.prompts import PromptLimits, PromptSet, PromptStream
from torchtitan.grpo.rollout.prompts.mixture import short_names
from torchtitan.grpo.rollout.tables import Table, open_table
from torchtitan.grpo.rollout.tokenizer import TextCodec

MAX_TOKENS = 8
LONG = "a" * (MAX_TOKENS + 1)


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> TextCodec:
    """One token a character."""
    model = tmp_path_factory.mktemp("model")
    character_tokenizer().save(str(model / "tokenizer.json"))
    return TextCodec(str(model), [])


class ListTable(Table):
    def __init__(self, prompts: list[str], path: str) -> None:
        self.path = path
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def row(self, i: int) -> dict[str, Any]:
        return {"prompt": self._prompts[i], "row": i}

    def where(self, i: int) -> str:
        return f"{self.path}:{i}"


def set_of(rows: Table, codec: TextCodec, set_name: str | None = None, **settings) -> PromptSet:
    limits = PromptLimits(MAX_TOKENS, 100)
    return PromptSet(rows, Prompts(**settings), codec, limits, "prompts.paths", set_name)


def mixture(codec: TextCodec, sets: list[list[str]], weights=()) -> tuple[list[PromptSet], list]:
    tables = [ListTable(prompts, f"set{i}") for i, prompts in enumerate(sets)]
    return [set_of(rows, codec, rows.path) for rows in tables], weights


def draw(stream: PromptStream, number: int) -> list[tuple[int, str, int]]:
    prompts = islice(iter(stream.next, None), number)
    return [(p.group_id, p.columns["prompt_set"], p.columns["row"]) for p in prompts]


def test_sets_are_drawn_from_by_their_weights_each_in_epochs_of_its_own(codec: TextCodec):
    stream = PromptStream(*mixture(codec, [["a"] * 4, ["b"] * 6], [3, 1]), seed=0, shuffle=True)
    drawn = draw(stream, 80)
    assert [index for index, _, _ in drawn] == list(range(80))
    for start in range(0, 80, 4):
        assert Counter(s for _, s, _ in drawn[start : start + 4]) == {"set0": 3, "set1": 1}
    for name, size in (("set0", 4), ("set1", 6)):
        rows = [row for _, s, row in drawn if s == name]
        epochs = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1


PROMPTS = st.lists(st.sampled_from(["a", "bb", LONG]), min_size=1, max_size=9).filter(
    lambda prompts: set(prompts) != {LONG}
)


@given(
    sets=st.lists(st.tuples(PROMPTS, st.integers(1, 9)), min_size=1, max_size=3),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    before=st.integers(0, 40),
    data=st.data(),
)
def test_resumed_stream_and_what_was_used_before_are_the_unbroken_stream(
    codec: TextCodec, sets, seed, shuffle, before, data
):
    after = 30
    prompts = mixture(codec, [rows for rows, _ in sets], [weight for _, weight in sets])
    unbroken = draw(PromptStream(*prompts, seed=seed, shuffle=shuffle), before + after)

    stopped = PromptStream(*prompts, seed=seed, shuffle=shuffle)
    handed_out = draw(stopped, before)
    pending = data.draw(st.sets(st.sampled_from(handed_out)) if handed_out else st.just(set()))
    shuffled = data.draw(st.permutations([index for index, _, _ in pending]))
    resumed = PromptStream(
        *prompts, seed=seed, shuffle=shuffle, position=stopped.position, pending=shuffled
    )
    drawn = draw(resumed, len(pending) + after)

    assert drawn[: len(pending)] == sorted(pending)
    assert drawn[len(pending) :] == unbroken[before:]
    used = [prompt for prompt in handed_out if prompt not in pending]
    assert sorted(used + drawn) == sorted(unbroken)
    assert len({index for index, _, _ in used + drawn}) == len(unbroken)
    for index, _, row in unbroken[:3]:
        assert stopped.prompt_at(index).columns["row"] == row


@pytest.mark.parametrize(
    ("pending", "message"),
    [
        ([5], r"below the stream's position 5, got 5"),
        ([-1], r"below the stream's position 5, got -1"),
        ([3, 1, 3], r"must be listed once, got \[1, 3, 3\]"),
    ],
)
def test_pending_prompts_that_cannot_be_are_refused(codec: TextCodec, pending, message):
    with pytest.raises(ValueError, match=message):
        PromptStream(*mixture(codec, [["a"]]), seed=0, shuffle=True, position=5, pending=pending)


def test_pending_prompt_that_has_become_too_long_is_refused(codec: TextCodec):
    prompts = mixture(codec, [["a", LONG]])
    stream = PromptStream(*prompts, seed=0, shuffle=False, position=4, pending=[0, 1])
    assert stream.next().group_id == 0
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"Prompt 1 was used before .* longer than the maximum of 8"
        ):
            stream.next()


def test_set_of_a_mixture_without_a_short_prompt_is_refused(codec: TextCodec):
    prompts = mixture(codec, [["a"] * 5, [LONG] * 3], [10, 1])
    stream = PromptStream(*prompts, seed=0, shuffle=True)
    with pytest.raises(ValueError, match=r"prompts.paths: none of the 3 prompts in set1 is"):
        draw(stream, 100)
    with pytest.raises(ValueError, match=r"none of the 3 prompts in set1 is"):
        prompts[0][1].sample()
    assert prompts[0][0].sample().text == "a"
    rows = ListTable([1, 1, LONG], "p")  # pyright: ignore[reportArgumentType]
    stream = PromptStream([set_of(rows, codec)], seed=0, shuffle=True)
    with pytest.raises(ValueError, match=r"none of the 3 prompts .*and 2 rows cannot be used"):
        stream.next()


def test_a_column_of_the_set_s_name_is_the_row_s_own(codec: TextCodec, tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "prompt_set": "mine"}\n{"prompt": "b"}\n')
    rows = open_table(str(path), "train", {}, "prompt", "prompts.paths")
    prompts = set_of(rows, codec, "p", template="{prompt_set}:{prompt}")
    found = [prompts.prompt(i, i) for i in range(2)]
    assert [p and p.columns for p in found] == [{"prompt_set": "mine"}, {"prompt_set": "p"}]
    assert [p and p.text for p in found] == ["mine:a", "p:b"]
    alone = set_of(rows, codec).prompt(1, 1)
    assert alone is not None and alone.columns == {}


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["d/train.jsonl", "owner/set-v1.5", "more.parquet"], ["train", "set-v1.5", "more"]),
        (["/a/k/x.jsonl", "/b/k/x.jsonl"], ["a-k-x", "b-k-x"]),
        (["x.jsonl", "b/x.jsonl"], ["x", "b-x"]),
        (["x.jsonl", "x.parquet", "x.json"], ["x", "x-2", "x-3"]),
        (["/x.jsonl", "/d/x.jsonl"], ["x", "d-x"]),
    ],
)
def test_files_have_short_names_without_slashes(paths, names):
    assert short_names(paths) == names


def test_folders_are_named_by_themselves(tmp_path: Path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert short_names([".", ".."]) == ["inner", tmp_path.name]


def test_the_file_of_a_prompt_is_known_by_its_index(codec: TextCodec):
    stream = PromptStream(*mixture(codec, [["a"] * 4, ["b"] * 2]), seed=0, shuffle=True)
    assert list(stream.file_names) == ["set0", "set1"]
    for prompt in [stream.next() for _ in range(18)]:
        assert stream.file_of(prompt.group_id) == ("set0" if prompt.text == "a" else "set1")
    alone = PromptStream(*mixture(codec, [["a"] * 4]), seed=0, shuffle=True)
    assert (list(alone.file_names), alone.file_of(3)) == ([], "")
