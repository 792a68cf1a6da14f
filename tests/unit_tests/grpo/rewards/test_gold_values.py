# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Expected answers: which are understood or refused, what they earn, and which cannot be earned."""

import math
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow
import pytest

from torchtitan.grpo.rewards.builtin import boxed_math, exact_match, last_number, partial_match
from torchtitan.grpo.rewards.gold_values import (
    answer_problem,
    gold_judge,
    right_answers,
    unearnable_warning,
)
from torchtitan.grpo.rewards.gsm8k import hash_answer_exact
from torchtitan.grpo.types import Prompt

UNDERSTOOD = [
    ("21", ["21"]), (21, ["21"]), (21.0, ["21", "21.0"]), (0.5, ["0.5"]), (-3, ["-3"]),
    (True, ["True", "true"]), (False, ["False", "false"]), (["21"], ["21"]), ([1, 2], ["1", "2"]),
    (["1/2", "0.5"], ["1/2", "0.5"]), (("a", 2.0), ["a", "2", "2.0"]), (b"21", ["21"]),
    ([True, "yes"], ["True", "true", "yes"]), (Decimal("1.50"), ["1.50"]), (2**70, [str(2**70)]),
    (np.float64(21.0), ["21", "21.0"]), (np.int64(21), ["21"]), (np.array(7), ["7"]),
    (np.array(["1", "2"]), ["1", "2"]), (pyarrow.scalar("21"), ["21"]),
    (pyarrow.array([1, 2]), ["1", "2"]), (pyarrow.scalar(["a", "b"]), ["a", "b"]),
]  # fmt: skip
REFUSED = [
    (None, "is null, and"), (math.nan, "is NaN, and"), (np.float32("nan"), "is NaN, and"),
    (math.inf, "is inf of type float"), ([], "is an empty list"), ([None], "is null within a list"),
    (["21", None], "is null within a list"), ([["21"]], r"is \['21'\] of type list within a list"),
    ({}, "is {} of type dict"), ([{"value": 1}], r"answer.value"), (b"\xff", "of type bytes"),
    ({"ground_truth": "21"}, r'prompts.rename = { "answer.ground_truth" = "answer" }'),
    (pyarrow.scalar(None), "is null, and"), (1 + 2j, "of type complex"),
]  # fmt: skip
GSM8K = "torchtitan.grpo.rewards.gsm8k"
COMPARING = [
    "exact_match",
    "partial_match",
    "last_number",
    "boxed_math",
    f"{GSM8K}:hash_answer_exact",
]
COMPARING += [f"{GSM8K}.hash_answer_exact"]


@pytest.mark.parametrize(("value", "texts"), UNDERSTOOD, ids=str)
def test_every_form_of_a_right_answer_counts(value, texts):
    assert right_answers(value) == texts
    assert answer_problem({"answer": value}, "exact_match") is None
    for text in texts:
        assert exact_match(["q"], [f" {text}\n"], answer=[value]) == [1.0]
        assert partial_match(["q"], [text], answer=[value]) == [1.0]
        assert boxed_math(["q"], [f"\\boxed{{{text}}}"], answer=[value]) == [1.0]
    assert exact_match(["q"], ["None"], answer=[value]) == [0.0]
    assert boxed_math(["q"], ["\\boxed{[]}"], answer=[value]) == [0.0]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=str)
def test_what_is_no_answer_is_refused_by_its_column(value, message):
    problem = answer_problem({"answer": value}, "boxed_math") or ""
    assert problem.startswith("the column 'answer' is ") and re.search(message, problem), problem


@pytest.mark.parametrize("function", COMPARING)
def test_every_row_is_judged_however_late_it_comes(function):
    judge = gold_judge(["think_answer_tags", function])
    assert [judge({"answer": str(n)}) for n in range(256)] == [None] * 256
    assert "is null" in (judge({"answer": None}) or "")
    assert f"is missing, and {function} compares with it" in (judge({}) or "")


@pytest.mark.parametrize(
    "answer", ["", "forty-two", "x2", "1/2", True, ["42", "none"], [1, "2 or 3"]]
)
def test_an_answer_without_one_number_is_refused_for_last_number_alone(answer):
    assert gold_judge(["boxed_math"])({"answer": answer}) is None
    for functions in (["last_number"], ["exact_match", "last_number"]):
        problem = gold_judge(functions)({"answer": answer}) or ""
        assert "must hold one number, such as 57" in problem and "prompts.rename" in problem


@pytest.mark.parametrize(
    "function", [exact_match, partial_match, last_number, boxed_math, hash_answer_exact]
)
@pytest.mark.parametrize(
    "value", [None, math.nan, [], {}, {"a": 1}, [None], pyarrow.scalar(None)], ids=str
)
def test_what_is_no_answer_leaves_the_completion_unscored(function, value):
    texts = ["None", "nan", "\\boxed{None}", "\\boxed{nan}", "\\boxed{}", "[]", "#### 0", "{}", ""]
    assert function(["q"] * len(texts), texts, answer=[value] * len(texts)) == [None] * len(texts)


def test_any_number_of_a_list_counts_after_the_hashes_and_the_closest_counts_in_part():
    assert partial_match(["q"] * 2, ["43", "98"], answer=[["4321", "9876"]] * 2) == [0.5, 0.5]
    texts = ["#### 21", "#### 22", "#### 23", "21"]
    for value in (["21", "22"], [21, 22.0], ["6*7=42\n#### 21", "22"], np.array([21, 22])):
        assert hash_answer_exact(["q"] * 4, texts, answer=[value] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_only_what_the_reward_functions_read_is_judged():
    assert gold_judge(["think_answer_tags", "mine.py:reward"])({"answer": None}) is None
    assert gold_judge(["exact_match"])({"other": 1}) is None  # said for the whole set
    image = gold_judge(["mine.py:reward"])({"image": object(), "answer": "1"})
    assert image is not None and re.match("column 'image': .*Convert or remove", image)


def unearnable(function: str, answers: list[Any]) -> str | None:
    """Returns the warning where each character is a token and 6 may be written."""
    ids, examples = np.array([1], np.int32), []
    for i, answer in enumerate(answers):
        row = {} if answer is ... else {"answer": answer}
        examples.append(Prompt(i, "6*7?", ids, row, f"train.jsonl:{i + 1}"))
    return unearnable_warning(function, examples, "prompts.path", len, 6)


@pytest.mark.parametrize("answer", ["", "  ", None, ...])
def test_an_empty_answer_is_reported_with_its_row_and_the_remedy(answer):
    for function in ("exact_match", "partial_match", "boxed_math"):
        found = unearnable(function, ["1", answer, answer]) or ""
        assert found.startswith(f"prompts.path: {function} cannot be earned in 2 of the first 3")
        assert "'answer' is empty in 2 of them (for example in train.jsonl:2)" in found
        assert "prompts.rename" in found


def test_an_answer_longer_than_the_longest_completion_is_reported():
    assert unearnable("exact_match", ["123456"]) is None
    found = unearnable("exact_match", [" 1234567 ", "1"]) or ""
    assert "longer than rollout.max_new_tokens (6) in 1 of them" in found
    # The mark before the answer counts.
    assert unearnable("boxed_math", ["So it is.\n#### 12"]) is None
    assert unearnable("boxed_math", ["123"]) is not None
    assert unearnable("last_number", ["It is 123,456."]) is None
    assert unearnable("last_number", ["1234567"]) is not None


def test_what_can_be_earned_in_part_or_by_an_own_rule_is_not_reported():
    assert unearnable("partial_match", ["1234567"]) is None
    assert unearnable("rewards.py:mine", [""]) is None
    assert unearnable("think_answer_tags", [...]) is None
