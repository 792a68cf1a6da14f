# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the reward: a built-in one that knows the data's own right answers from wrong ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan.grpo.init_config.columns import MOST, Columns
from torchtitan.grpo.rewards.reward_loading import load_function

Form = Literal["boxed", "hash", "alone", "free"]
"""How a completion states its answer: in ``\\boxed{}``, after ``####``, as nothing but the answer, or
in a form that only the user's own reward knows."""

HASH_FORMAT = "torchtitan.grpo.rewards.gsm8k:hash_answer_format"
_FORMAT_WEIGHT = 0.2
_MISTAKEN = 0.05
_LONGEST_BARE = 200
# What the end of a prompt that is to be continued with the bare answer looks like.
_OPENING = (":", ">", "=", "→")


@dataclass(frozen=True)
class RewardChoice:
    """``hits`` of ``num_rows`` right answers earn 1.0; ``reason`` says why no built-in fits."""

    functions: tuple[str, ...]
    weights: tuple[float, ...]
    form: Form
    hits: int = 0
    num_rows: int = 0
    reason: str = ""

    @property
    def is_builtin(self) -> bool:
        return self.form != "free"


def opens_answer(columns: Columns) -> bool:
    """Whether prompts end as if the answer were to follow at once, as in ``7425473->``."""
    ends = [isinstance(text, str) and text.rstrip().endswith(_OPENING) for text in columns.texts]
    return sum(ends) >= MOST * len(ends)


def choose_reward(columns: Columns, *, has_template: bool) -> RewardChoice:
    """Tries the built-in rewards on the answers of the first rows, the most telling form first."""
    if columns.answer is None:
        return _none("no column is known to hold right answers")
    answers = columns.answers
    golds = [found[0] if found else "" for found in answers]
    if found := _judged("boxed_math", golds, answers, _marked_form(golds)):
        return _with_format(found, golds)
    is_bare = [0 < len(gold) <= _LONGEST_BARE and "\n" not in gold.strip() for gold in golds]
    if sum(is_bare) < MOST * len(is_bare):
        return _none(f"the column {columns.answer!r} holds texts that are too long to be compared")
    if has_template or not opens_answer(columns):
        boxed = [f"\\boxed{{{gold.strip()}}}" for gold in golds]
        if found := _judged("boxed_math", boxed, answers, "boxed"):
            return found
    if found := _judged("exact_match", golds, answers, "alone"):
        return found
    return _none(
        f"no built-in reward tells the right answers in {columns.answer!r} from those of other rows"
    )


def _none(reason: str) -> RewardChoice:
    return RewardChoice((), (), "free", reason=reason)


def _marked_form(golds: Sequence[str]) -> Form:
    with_hashes = sum("####" in gold and "boxed" not in gold for gold in golds)
    return "hash" if 2 * with_hashes >= len(golds) else "boxed"


def _with_format(found: RewardChoice, golds: list[str]) -> RewardChoice:
    """Adds a smaller reward for the form, which a model learns first, where the answers have it."""
    num_formed = sum(_scores(HASH_FORMAT, golds, [[gold] for gold in golds]))
    if found.form != "hash" or num_formed < MOST * len(golds):
        return found
    functions, weights = (*found.functions, HASH_FORMAT), (1.0, _FORMAT_WEIGHT)
    return RewardChoice(functions, weights, found.form, found.hits, found.num_rows)


def _judged(
    function: str, completions: list[str], answers: list[list[str]], form: Form
) -> RewardChoice | None:
    """Returns the choice if right answers earn 1.0, and those of other rows do not."""
    hits = sum(_scores(function, completions, answers))
    wrong = [
        (completion, other)
        for completion, right, other in zip(completions, answers, [*answers[1:], answers[0]], strict=True)
        if other and not set(right) & set(other)
    ]  # fmt: skip
    mistaken = sum(_scores(function, [c for c, _ in wrong], [other for _, other in wrong]))
    if hits < MOST * len(answers) or mistaken > _MISTAKEN * len(answers):
        return None
    return RewardChoice((function,), (1.0,), form, hits, len(answers))


def _scores(function: str, completions: list[str], answers: list[list[str]]) -> list[bool]:
    scores = load_function(function)(completions, completions, answer=answers)
    return [score == 1.0 for score in scores]
