# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import pytest

from torchtitan.grpo.rewards.builtin import (
    boxed_math,
    exact_match,
    last_number,
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


INVISIBLE = ["\u200b", "\u2060", "\ufeff", "\u00ad", "\x00", "\ufe0f", "\U000e0101", "\u180e", "\u034f", "\u3164",
             "\u115f", "\uffa0", "\u2800", "\u202e", "\U000e0041", "\x1b", "\u2028", "\u0301", "\u2065", "\U0001d159", "\ufffc"]  # fmt: skip


@pytest.mark.parametrize("character", INVISIBLE, ids=ascii)
def test_invisible_text_is_no_text(character):
    forms = [
        f"<think>{t}</think><answer>{a}</answer>"
        for t, a in ((character, "4"), ("4", f" {character} "))
    ]
    assert think_answer_tags(["q"] * 2, forms) == [0.0, 0.0]
    assert think_answer_tags(["q"], [f"<think>{character}x</think><answer>四</answer>"]) == [1.0]


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("79 - 22 = 57", "57"), ("5-3", "3"), ("5 – 3", "3"), ("(2+5)-4", "4"), ("10%-5%", "5"), ("3 * -4", "-4"),
        ("It is -5.", "-5"), ("It is −5.", "-5"), ("-$5", "-5"), ("$-5", "-5"), ("x=-3", "-3"),
        ("So it is 57.", "57"), ("57.\n\n", "57"), ("**57**", "57"), ("\\boxed{57}", "57"), ("so...57", "57"),
        ("$1,234.50 in all", "1234.5"), ("1{,}234", "1234"), ("€12,345,678", "12345678"), ("1, 2,3", "3"),
        ("5.0", "5"), ("5", "5.00"), (".5", "0.5"), ("50%", "50"), ("1.5e3", "1500"), ("57km", "57"),
        ("57, with x2 and y_3", "57"), ("57 for GPT2", "57"), ("57 of version 3.14.15", "3.14"),
        ("1e9999999", "1"), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_last_number_reads_numbers_as_models_write_them(completion, number):
    assert last_number(["q"] * 2, [completion] * 2, answer=[number, "77.77"]) == [1.0, 0.0]
    messages = [{"role": "assistant", "content": completion}]
    assert last_number(["q"], [messages], answer=[[number, "77.77"]]) == [1.0]


@pytest.mark.parametrize("completion", ["", "fifty-seven", "x2", "a_7", "½"])
def test_a_completion_without_a_number_earns_nothing(completion):
    assert last_number(["q"], [completion], answer=["2"]) == [0.0]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("So 6*7 = 42.\n#### 42", 1.0), ("The answer is $42.", 1.0), ("\\boxed{42}", 1.0), (42.0, 1.0), ("42 apples", 1.0),
        ("42\\%", 1.0), ("42\\text{ cm}", 1.0), ("42^\\circ", 1.0), ("\\$42", 1.0), ("x = 42", 1.0), ("42-year", 1.0),
        ("42km", 1.0), ("x+42", None), ("42x2", None), ("x^{42}", None), ("+42", 1.0), ("x^42", None), ("42\\pi", None), ("42-x", None),
        ("x - 42", None), ("42 * x", None), ("a_42", None),
        (43, 0.0), (["41", "42"], 1.0), ("1/2", None), ("forty-two", None), (None, None), (["43", "none"], None),
    ],
)  # fmt: skip
def test_last_number_compares_with_an_expected_answer_that_holds_one_number(answer, reward):
    assert last_number(["q"], ["It is 42."], answer=[answer]) == [reward]


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
