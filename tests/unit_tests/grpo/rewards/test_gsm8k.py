# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import pytest

from torchtitan.grpo.rewards.gsm8k import hash_answer_exact, hash_answer_format

RAW_ANSWER = (
    "She sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "She sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72"
)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (RAW_ANSWER, 1.0),
        ("#### 72", 1.0),
        (" It is 72.\n#### -1,072.50\n\n", 1.0),
        ("It is 72.\n#### $72", 1.0),
        ("It is 72.\n#### 72\nAnd that is that.", 0.5),
        ("#### 72\n#### 72", 0.5),
        ("It is 72. #### 72", 0.0),
        ("It is 72.\n#### seventy-two", 0.0),
        ("It is 72.\n#### 72 clips", 0.0),
        ("It is 72.\n####\n72", 0.0),
        ("It is 72.\n##### 72", 0.0),
        ("", 0.0),
    ],
)
def test_format_is_rewarded_in_full_only_for_one_number_line_at_the_end(
    completion: str, reward: float
) -> None:
    assert hash_answer_format(prompts=["q"], completions=[completion]) == [reward]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("#### 72", RAW_ANSWER, 1.0),
        ("#### 72", "72", 1.0),
        ("#### 1,072", "so\n#### 1072", 1.0),
        ("#### $5.0", "#### 5", 1.0),
        ("#### 73", RAW_ANSWER, 0.0),
        ("#### 72\n#### 73", RAW_ANSWER, 0.0),
        ("The answer is 72", RAW_ANSWER, 0.0),
    ],
)
def test_exactness_compares_the_last_number_line_with_the_raw_column(
    completion: str, answer: str, reward: float
) -> None:
    assert hash_answer_exact(prompts=["q"], completions=[completion], answer=[answer]) == [reward]


def test_an_expected_answer_without_a_number_is_refused_with_the_keys_to_check() -> None:
    with pytest.raises(ValueError, match=r"prompts\.path"):
        hash_answer_exact(prompts=["q"], completions=["#### 1"], answer=["#### none"])


def test_further_columns_and_conversational_completions_are_taken() -> None:
    completions = [[{"role": "assistant", "content": "#### 72"}]]
    assert hash_answer_format(prompts=["q"], completions=completions, question=["q"]) == [1.0]
    assert hash_answer_exact(
        prompts=["q"], completions=completions, answer=["72"], question=["q"]
    ) == [1.0]
