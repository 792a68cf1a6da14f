# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the reward: a built-in one if it tells the right answers in the data from wrong ones."""

import re
import statistics
from dataclasses import dataclass
from typing import Literal

from torchtitan.grpo.commands.init.columns import MOST, Columns
from torchtitan.grpo.rewards.answer_text import TEXT
from torchtitan.grpo.rewards.final_answers import is_number, read_expected
from torchtitan.grpo.rewards.reward_loading import load_function
from torchtitan.grpo.rollout.prompts.prompt_set import num_characters

Form = Literal["boxed", "number", "calculation", "alone", "free"]
"""How a completion states its answer: in ``\\boxed{}``, as its last number (``calculation`` if a line is
enough for that), as nothing but the answer, or in a form that only the user's own reward knows."""

_MISTAKEN = 0.05
_LONGEST_BARE = 200
_SHORT_QUESTION = 64  # characters; those of GSM8K have 230
# What says where the answer is to be. A heading of Markdown does not.
_MARKS = re.compile(r"\\(?:boxed|fbox)|####\s*[<\[{]|(?<=[^\s#])[^\S\n]*+####(?!#)")
# Characters of an answer besides its result, such as those of "The answer is", if it is nothing else.
_LEAD_IN = 16
# Mathematics is a letter, or has a digit or a command. Words would be read as products of letters: "listen"
# would equal "silent". They may be names of functions, or stand in LaTeX or, as units, at the end.
_NAMES = re.compile(
    rf"{TEXT.pattern}|\\(?:begin|end)\s*\{{[^{{}}]*\}}|(?<!:)\\[A-Za-z]+|(?<=[\d)}}%])\s*[A-Za-z]+(?:\s[A-Za-z]+){{,2}}$|"
    r"(?<![^\W\d_])(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|sqrt|abs|max|min|mod|gcd|lcm|infinity|pi|and|or)(?![^\W\d_])"
)
_MATHEMATICS = re.compile(r"(?!.*\d(?:st|nd|rd|th)\b)(?:.*[\d^=\\]|\W*[A-Za-z]\W*$)", re.DOTALL)
# Words, and what else addresses, programs, versions, and names with digits have.
_NO_MATHEMATICS = re.compile(
    r"[^\W\d_]{3}|[A-Za-z]{2}\s+[A-Za-z]{2}|(?<!\d)[A-Za-z]\d|\d[A-DF-Za-df-z]\d|\d\.\d+\.\d|\w\[|"
    r"[@\"`“”„]|(?<![\w')}])'|(?<!\\)#|://|:\\|==|[-+*/]="
)
# What the end of a prompt that is to be continued with the bare answer looks like.
_OPENING = (":", ">", "=", "→")


@dataclass(frozen=True)
class RewardChoice:
    """A reward function for the data, or why no built-in one fits.

    Of the data's ``num_rows`` right answers, ``hits`` get 1.0 from the function.
    """

    function: str
    form: Form
    hits: int = 0
    num_rows: int = 0
    reason: str = ""

    @property
    def is_builtin(self) -> bool:
        return self.form != "free"


def opens_answer(columns: Columns) -> bool:
    """Whether prompts end with a sign that the answer follows, as in ``7425473->``."""
    ends = [isinstance(text, str) and text.rstrip().endswith(_OPENING) for text in columns.texts]
    return sum(ends) >= MOST * len(ends)


def say_form(columns: Columns) -> bool:
    """Whether prompts already say in which form the answer must be marked."""
    parts = ([t] if isinstance(t, str) else [m["content"] or "" for m in t] for t in columns.texts)
    num_said = sum(_MARKS.search("\n".join(contents)) is not None for contents in parts)
    return 2 * num_said >= len(columns.texts)


def ask_briefly(columns: Columns) -> bool:
    """Whether the questions are short and contain numbers, like simple arithmetic problems."""
    if 2 * sum(any(map(str.isdigit, str(text))) for text in columns.texts) < len(columns.texts):
        return False
    return statistics.median(map(num_characters, columns.texts)) <= _SHORT_QUESTION


def are_results(columns: Columns) -> bool:
    """Whether right answers are only final results, without the reasoning."""
    golds = [found[0] for found in columns.answers if found]
    extra = [len(gold) - len(read_expected(gold)) for gold in golds]
    return bool(golds) and statistics.median(extra) <= _LEAD_IN


def choose_reward(columns: Columns, *, has_template: bool) -> RewardChoice:
    """Tries the built-in rewards on the answers of the first rows; the most specific form is tried first."""
    if columns.answer is None:
        return _none("no column is known to hold right answers")
    answers = columns.answers
    golds = [found[0] if found else "" for found in answers]
    are_formulas = sum(map(_is_mathematics, golds)) >= MOST * len(golds)
    # They have marks of their own.
    if are_formulas and (found := _judged("boxed_math", golds, answers, "boxed")):
        return found
    is_bare = [0 < len(gold) <= _LONGEST_BARE and "\n" not in gold.strip() for gold in golds]
    if sum(is_bare) < MOST * len(is_bare):
        return _none(f"the column {columns.answer!r} holds texts that are too long to be compared")
    if has_template or not opens_answer(columns):
        are_numbers = all(is_number(answer) for found in answers for answer in found)
        is_last = are_numbers and not say_form(columns)
        form: Form = "calculation" if ask_briefly(columns) else "number"
        if is_last and (found := _judged("last_number", golds, answers, form)):
            return found
        boxed = [f"\\boxed{{{gold.strip()}}}" for gold in golds]
        if are_formulas and (found := _judged("boxed_math", boxed, answers, "boxed")):
            return found
    if found := _judged("exact_match", golds, answers, "alone"):
        return found
    return _none(
        f"no built-in reward tells the right answers in {columns.answer!r} from those of other rows"
    )


def _is_mathematics(gold: str) -> bool:
    text = read_expected(gold).strip()
    return bool(_MATHEMATICS.match(text)) and not _NO_MATHEMATICS.search(_NAMES.sub(" ", text))


def _none(reason: str) -> RewardChoice:
    return RewardChoice("", "free", reason=reason)


def _judged(
    function: str, completions: list[str], answers: list[list[str]], form: Form
) -> RewardChoice | None:
    """Returns the choice of ``function`` if it gives 1.0 to right answers, and not to those of other rows."""
    hits = _num_right(function, completions, answers)
    others = [*answers[1:], answers[0]]
    wrong = [
        (completion, other)
        for completion, right, other in zip(completions, answers, others, strict=True)
        if other and not set(right) & set(other)
    ]
    mistaken = _num_right(function, [c for c, _ in wrong], [other for _, other in wrong])
    if hits < MOST * len(answers) or mistaken > _MISTAKEN * len(answers):
        return None
    return RewardChoice(function, form, hits, len(answers))


def _num_right(function: str, completions: list[str], answers: list[list[str]]) -> int:
    scores = load_function(function)(completions, completions, answer=answers)
    return sum(score == 1.0 for score in scores)
