# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What judges write, the score that it says, and the time that reading it takes."""

import pytest

from torchtitan.grpo.rewards.judge import written_score

# A number is read as it was meant, or not at all.
WRITTEN: dict[str, float | None] = {
    "Score: 8 of 10": 8, "8/10 (80%)": 8, "7 (scale 0-10)": 7, ".8": 0.8, "8⁄10": 8, "8 ⁄ 10": 8, "1e1": 10, "1e-1": 0.1,
    "7,5": None, "8,5": None, "1.234,5": None, "1,000": None, "10,000.5": None, "1 000": None, "1\u202f000": None, "8'000": None,
    "−3": -3, "-3": -3, "+3": 3, "–3": None, "Score: - 3": None, "- 3": None, "٨": 8, "８／１０": 8, "½": None, "8½": None,
    "8 1/2": None, "8 and a half": None, "2²": None, "8^2": None, "√8": None, "Ⅷ": None, "③": None, "\\frac{8}{10}": None,
    "\\dfrac 8 10": None, "\\frac12": None, "8\\frac{1}{2}": None, "$8$": 8, "\\(8\\)": 8, "\\boxed{8/10}": 8, "10/10": 10,
    "8 out of 10": 8, "8 out of a possible 10": 8, "7 on a scale from 0 to 10": 7, "8 von 10": None, "8 over 10": None,
    "3 to 4": None, "7-8": None, "7–8": None, "between 7 and 8": None, "7 or 8": None, "7, 8": None, "3 + 4": None,
    "3 + 4 = 7": None, "8/10 = 0.8": None, "80%": None, "80 %": None, "8\\%": None, "8 (80%)": 8, "I am 90% sure: 7": None,
    "2024-01-05": None, "5/1/2024": None, "January 5, 2024": None, "7:30": None, "8:10": None, "8 : 10": None, "1.2.3": None,
    "8..10": None, "8th": None, "8pts": None, "8 points.": 8, "8 hundred": None, "10k": None, "x2": None, "~8": None, "8+": None,
    "> 8": None, "≥8": None, "-> 8": None, "1_000": None, "eight/10": None, "**Score:** 8": 8, "**Score**: **8** / 10": 8, "Score: 8.": 8,
    "Score: 8\nHe lost points in step 2.": 8, "Score: 8\nMax score: 10": 8, "Step 1 is right. Score: eight": None,
    "Score:\nStep 1 is right": None, "<score>8</score><max>10</max>": 8, '{"score": 8, "max": 10}': 8, "Rating: [[8]]": 8,
    **dict.fromkeys([
        "Score: X out of 10", "Score: ?/10", "Score: -/10", "Score: ... / 10", "Score: five out of 10", "zero of 10", "none of 10",
        "评分：八分，满分10", "Score: N/A (max 10)", '{"score": null, "max": 10}', '{"score": "eight", "max": 10}', "Max score: 10",
        '{"score": {"max": 10, "value": 8}}', "Score out of 10: eight", "Out of 10: seven.", "seven, the limit is 10", "X/10",
        "I cannot give it a 10.", "On a scale of 0 to 10 this is a seven", "Score: [0-10]", "Score: <number from 0 to 10>",
        "Score: 1{,}000", "Score: 8{,}5", "Score: 8\\,000", "Score: 8 \\times 10", "Score: 8\\cdot10", "Score: {8 \\over 10}",
        "Score: 8 ½", "Score: 1 e1", "Score: 0. 8", "Score: 8 . 5", "Score: 8 point five", "Score: minus 2", "Score: negative 2",
        "Score: 80％", "80％", "Score: 8\\text{ percent}", "Score: 80% (8/10)", "Score: >= 8", "Score: \\ge 8", "Score: &gt; 8",
        "Score: at least 8", "at least 8", "Score: not 8", "not 8", "Score: \\sqrt{64}", "Score: sqrt(64)", "Score: 7 | 8",
        "Score: 7 → 8", "Score: 7 or maybe 8", "7 or maybe 8", "Score: 7 up to 8", "Score: was 8, now 6", "Score: 8, revised to 6",
        "Score: A: 7, B: 8", "A: 7, B: 8", "Score: Correctness 5/5, explanation 2/5", "Score: -2 for style, so 8",
        "Score: deduct 2 points from 10, so 8", "Score: 3 errors", "Score: The answer to question 3 is right, so 8",
        "<score>eight</score> 3 errors", "[[A]] 3 errors", "There are 3 errors.", "\\boxed{8}\\%", "Score: 8\u200b5",
        '{"scores": [8, 9]}', "minus 2", "Score:\n1. The answer is right. 2 is not.",
    ]),
    "8 points out of 10": 8, "8 stars out of 10": 8, "8 points of 10": 8, "8 out of the 10": 8, "8 of max. 10": 8, "8, max 10": 8,
    "8; max 10": 8, "8 - max 10": 8, "8. The maximum is 10.": None, "8\\/10": 8, "7 on a scale of 10": 7, "Score: `8`": 8,
    "__8__": 8, "Score: <8>": 8, "Score: 8.Good": 8, '{"score": 8, "grade": "B"}': 8, "Score: 8\u200b": 8, "8/10, 80%": 8,
    "Score: 8\nVerdict: correct": 8, "I give it an 8.": None, "Score: 8. The step is right.": 8, "Score: 8/10 because it is right": 8,
    "我给8分": None, "满分10分，我给8分。": None, "8分（满分10分）": 8, "7到8分": None, "8分半": None, "评分：8": 8, "10万": None,
}  # fmt: skip


@pytest.mark.parametrize(("answer", "score"), WRITTEN.items(), ids=map(ascii, WRITTEN))
def test_a_written_number_is_read_rightly_or_not_at_all(answer: str, score: float | None):
    assert written_score(answer, is_cut=False) == score
    assert written_score(f"Step 1 is right.\n\n{answer}\n", is_cut=False) == score


PARTS = ["8", " ", "8 ", "8(", "8 - ", "score: ", "**a", "<a", "[[", "a", "1,", "½", "\n", "8 of ", "a/", "a.", "a:", "answer:", "Score: 8, ",
         "}]", "8%", "max score: ", "8 (of ", "8, 8%", " on a scale 1"]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", PARTS)
def test_a_long_answer_is_read_in_linear_time(part: str):
    for end in ("", "!", "x"):
        for is_cut in (False, True):
            written_score("Score: 8" * is_cut + part * (2**17 // len(part)) + end, is_cut=is_cut)
