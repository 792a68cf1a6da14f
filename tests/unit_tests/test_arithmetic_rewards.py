# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""`examples/arithmetic.py`, and the questions of `scripts/make_arithmetic.py`."""

import json
import random
import re

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
    ],
)
def test_wrong_numbers_are_told_apart(completion, digits, nearness):
    columns = {"completions": [completion], "answer": ["128"]}
    assert rewards.right_digits(**columns) == pytest.approx([digits])
    assert rewards.nearness(**columns) == pytest.approx([nearness])


def test_pairs_are_all_different_and_all_of_them_if_no_number_is_given():
    assert sorted(script.draw_pairs(random.Random(0), 3, 0)) == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)
    ]  # fmt: skip
    pairs = script.draw_pairs(random.Random(0), 9999, 1000)
    assert len(set(pairs)) == 1000
    assert all(0 <= small <= large <= 9999 for small, large in pairs)


def test_shipped_questions_are_answered_and_held_out_ones_are_not_trained_on():
    folder = REPOSITORY / "assets/arithmetic"
    read = {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in folder.glob("*.jsonl")
    }
    assert read.keys() == {"train", "heldout_sums", "heldout_differences"}
    pairs = {
        name: [tuple(sorted(map(int, re.findall(r"\d+", row["prompt"])))) for row in rows]
        for name, rows in read.items()
    }
    of_sums, of_differences = pairs["heldout_sums"], pairs["heldout_differences"]
    assert not set(pairs["train"]) & {*of_sums, *of_differences}
    answers = {name: [int(row["answer"]) for row in rows] for name, rows in read.items()}
    assert answers["heldout_sums"] == [small + large for small, large in of_sums]
    assert answers["heldout_differences"] == [large - small for small, large in of_differences]
    for (small, large), answer in zip(pairs["train"], answers["train"], strict=True):
        assert answer in (large + small, large - small)
