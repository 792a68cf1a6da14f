# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import pytest

from torchtitan.grpo.rewards.builtin import (
    boxed_math,
    exact_match,
    partial_match,
    read_expected,
    think_answer_tags,
)
from torchtitan.grpo.rewards.gsm8k import hash_answer_exact, hash_answer_format


def test_exact_match_ignores_white_space_around_the_answer():
    assert exact_match(["q"] * 3, [" 42\n", "42.", "4"], answer=["42", "42", 4]) == [1.0, 0.0, 1.0]
    conversational = [{"role": "assistant", "content": "42"}]
    assert exact_match(["q"], [conversational], answer=["42"]) == [1.0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("4321", 1.0), ("4329", 0.75), ("43", 0.5), ("432100", 4 / 6), ("1234", 0.0), ("", 0.0)],
)
def test_partial_match_counts_equal_positions_over_the_longer_length(completion, expected):
    assert partial_match(["q"], [completion], answer=["4321"]) == [pytest.approx(expected)]
    assert partial_match(["q"], [""], answer=[""]) == [1.0]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The answer is 42", "42"), ("The answer is 42.", "42"), (" 42 ", "42"),
        ("So she has 3.5. The final answer is: 3.5.", "3.5"), ("The answer is 4.\n#### 5", "5"),
        ("Answer: \\frac{1}{2}", "\\frac{1}{2}"), ("The answer is 4? No, the answer is 5.", "5"),
        ("The answer is", "The answer is"), ("There are 42 apples", "There are 42 apples"),
    ],
)  # fmt: skip
def test_expected_answers_are_read_where_they_say_so(answer, expected):
    assert read_expected(answer) == expected
    assert boxed_math(["q"], [f"\\boxed{{{expected}}}"], answer=[answer]) == [1.0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0), ("\n<think>a\nb</think>\n<answer>c</answer>\n", 1.0),
        ("<think></think><answer>b</answer>", 0.0), ("<think>a</think><answer>b</answer> done", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0), ("<answer>b</answer>", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_think_answer_tags_wants_the_whole_form(completion, expected):
    assert think_answer_tags(["q"], [completion]) == [expected]


RAW_ANSWER = (
    "She sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "She sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72"
)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (RAW_ANSWER, 1.0), ("#### 72", 1.0), (" It is 72.\n#### -1,072.50\n\n", 1.0),
        ("It is 72.\n#### $72", 1.0), ("It is 72.\n#### 72\nAnd that is that.", 0.5),
        ("#### 72\n#### 72", 0.5), ("It is 72. #### 72", 0.0), ("It is 72.\n#### seventy-two", 0.0),
        ("It is 72.\n#### 72 clips", 0.0), ("It is 72.\n####\n72", 0.0), ("It is 72.\n##### 72", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_format_is_rewarded_in_full_only_for_one_number_line_at_the_end(completion, reward):
    assert hash_answer_format(prompts=["q"], completions=[completion]) == [reward]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("#### 72", RAW_ANSWER, 1.0), ("#### 72", "72", 1.0), ("#### 1,072", "so\n#### 1072", 1.0),
        ("#### $5.0", "#### 5", 1.0), ("#### 73", RAW_ANSWER, 0.0), ("#### 72\n#### 73", RAW_ANSWER, 0.0),
        ("The answer is 72", RAW_ANSWER, 0.0),
    ],
)  # fmt: skip
def test_exactness_compares_the_last_number_line_with_the_raw_column(completion, answer, reward):
    assert hash_answer_exact(prompts=["q"], completions=[completion], answer=[answer]) == [reward]


def test_an_expected_answer_without_a_number_is_refused_with_the_keys_to_check():
    with pytest.raises(ValueError, match=r"prompts\.path"):
        hash_answer_exact(prompts=["q"], completions=["#### 1"], answer=["#### none"])
