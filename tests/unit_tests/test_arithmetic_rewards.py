# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""`examples/arithmetic.py`, and the questions of `scripts/make_arithmetic.py`."""

import json
import random
import re
from pathlib import Path

import pytest
from load_script import REPOSITORY, load_script

rewards = load_script("examples/arithmetic.py")
script = load_script("scripts/make_arithmetic.py")


@pytest.mark.parametrize(
    ("completion", "digits", "nearness"),
    [
        ("64 + 64 = 128", 1, 1),
        ("64 + 64 = 128.00", 1, 1),
        ("It is 126.", 2 / 3, 1 / 1.5),
        ("28", 2 / 3, 1 / 26),
        ("1128", 3 / 4, 1 / 251),
        ("128.5", 0, 1 / 1.125),
        ("It is -128.", 0, 1 / 65),
        ("I do not know.", 0, 0),
        ("1e30", 0, 0),
        ("9" * 28, 0, 0),
        ("9" * 29, 0, 0),
        ("9" * 40, 0, 0),
        ([{"role": "assistant", "content": "It is 126."}], 2 / 3, 1 / 1.5),
    ],
)
def test_wrong_numbers_are_told_apart(completion, digits, nearness):
    for answer in ("128", 128):
        columns = {"completions": [completion], "answer": [answer]}
        assert rewards.right_digits(**columns) == pytest.approx([digits])
        assert rewards.nearness(**columns) == pytest.approx([nearness])


def test_digits_of_negative_numbers_count_if_the_sign_is_right():
    digits = rewards.right_digits(completions=["It is -126.", "126"], answer=["-128", "-128"])
    assert digits == pytest.approx([2 / 3, 0])


def test_pairs_are_all_different_and_all_of_them_if_no_number_is_given():
    assert sorted(script.draw_pairs(random.Random(0), 3, 0)) == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)
    ]  # fmt: skip
    pairs = script.draw_pairs(random.Random(0), 9999, 1000)
    assert len(set(pairs)) == 1000
    assert all(0 <= small <= large <= 9999 for small, large in pairs)


def make(monkeypatch, folder: Path, *options: str) -> dict[str, str]:
    """Runs the script; returns the texts of the files that it writes."""
    monkeypatch.setattr("sys.argv", ["make_arithmetic.py", "--output", str(folder), *options])
    script.main()
    return {file.stem: file.read_text() for file in folder.glob("*.jsonl")}


@pytest.mark.parametrize("options", [["--largest", "10"], ["--largest", "20", "--rows", "1000"]])
def test_numbers_without_enough_pairs_are_refused(monkeypatch, tmp_path, capsys, options):
    with pytest.raises(SystemExit):
        make(monkeypatch, tmp_path, *options)
    assert "at most the" in capsys.readouterr().err


def test_shipped_questions_are_those_of_the_script(monkeypatch, tmp_path):
    shipped = {file.stem: file.read_text() for file in REPOSITORY.glob("assets/arithmetic/*.jsonl")}
    assert make(monkeypatch, tmp_path) == shipped


@pytest.mark.parametrize("options", [[], ["--largest", "9999", "--rows", "1000"]])
def test_questions_are_answered_and_held_out_ones_are_not_trained_on(
    monkeypatch, tmp_path, options
):
    texts = make(monkeypatch, tmp_path, *options)
    assert texts.keys() == {"train", "heldout_sums", "heldout_differences"}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in texts.items()}
    assert [len(rows[name]) for name in ("heldout_sums", "heldout_differences")] == [128, 128]
    assert len(rows["train"]) == (744 if options else 101 * 102 // 2 - 256)
    pairs = {
        name: [tuple(sorted(map(int, re.findall(r"\d+", row["prompt"])))) for row in of_file]
        for name, of_file in rows.items()
    }
    of_sums, of_differences = pairs["heldout_sums"], pairs["heldout_differences"]
    assert not set(pairs["train"]) & {*of_sums, *of_differences}
    answers = {name: [int(row["answer"]) for row in of_file] for name, of_file in rows.items()}
    assert answers["heldout_sums"] == [small + large for small, large in of_sums]
    assert answers["heldout_differences"] == [large - small for small, large in of_differences]
    for (small, large), answer in zip(pairs["train"], answers["train"], strict=True):
        assert answer in (large + small, large - small)
