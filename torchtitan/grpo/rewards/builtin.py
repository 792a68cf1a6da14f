# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reward functions that come with the trainer, in TRL's signature.

Lists of equal length have one entry for each completion. A completion is a string or, for a
conversational prompt, a list with one message of the assistant. ``answer`` is from the data set.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan.grpo.rewards.final_answers import ends_in, final_answer, read_expected
from torchtitan.grpo.rewards.gold_values import right_answers
from torchtitan.grpo.rewards.math_answers import OutOfTime, same_answer

Completion = str | list[dict[str, str]]

_PART = r"((?:(?!</?(?:think|answer)>).)*)"  # without another tag
_THINK_ANSWER = re.compile(rf"\s*<think>{_PART}</think>\s*<answer>{_PART}</answer>\s*", re.DOTALL)
# Fillers of Hangul, blanks of Braille and of hieroglyphs, a note without a head, and the mark of an object.
_BLANK = "\u115f\u1160\u3164\uffa0\ufffc\u2800\U00013441\U00013442\U0001d159"


def exact_match(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Returns 1 if the completion equals the answer but for white space around both, else 0.

    If the answer is a list, any element counts. Without an answer, returns ``None`` (see `gold_values`).
    """
    return _best(completions, answer, lambda text, right: float(text.strip() == right.strip()))


def partial_match(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Returns the fraction of positions at which the completion has the answer's character.

    The number of equal characters is divided by the greater length. White space around both texts is
    ignored. Of a list of answers, the closest one counts.

    Example: answer ``4321``. ``4321`` earns 1, ``4329`` earns 3/4, ``43`` earns 2/4, ``432100``
    earns 4/6, ``1234`` earns 0.
    """
    return _best(
        completions, answer, lambda text, right: _matching_fraction(text.strip(), right.strip())
    )


def boxed_math(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    answer: Sequence[Any],
    log_unscorable: Callable[[int], None] = lambda index: None,
    **_: Any,
) -> list[float | None]:
    r"""Returns 1 if the completion's final answer is mathematically equal to the expected one.

    The final answer is the content of the last ``\boxed{...}``, or else what follows the last
    ``####``; a completion with neither earns 0. The expected answer, or any of a list, is read in the
    same way. Failing that, it is what follows ``The answer is``, or else the whole text. ``1/2``,
    ``0.5`` and ``\frac{1}{2}`` are equal (see `math_answers`). A completion that cannot be compared
    within the limit of processor time receives ``None``, and counts as unscorable unless the expected
    answer is the cause.
    """
    scores = _best(completions, answer, _equal_answers)
    for i, score in enumerate(scores):
        expected = [] if score is not None else right_answers(answer[i])
        if expected and all(map(_is_comparable, expected)):
            log_unscorable(i)
    return scores


def last_number(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Returns 1 if the last number of the completion equals the expected one, else 0.

    ``79 - 22 = 57.``, ``$57.00`` and ``57%`` end in 57, ``5-3`` in 3, and ``f(x2)`` in none
    (see :func:`~.final_answers.numbers_in`). The expected answer, or any of a list, is read as in
    `boxed_math`. If it does not hold exactly one number, ``None`` is returned.
    """
    return _best(completions, answer, ends_in)


def _best(
    completions: Sequence[Completion],
    answers: Sequence[Any],
    score: Callable[[str, str], float | None],
) -> list[float | None]:
    """Returns each completion's best score over its right answers, or ``None`` if that is uncertain."""
    best: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        text = completion_text(completion)
        scores = [score(text, right) for right in right_answers(answer)]
        known = [value for value in scores if value is not None]
        is_certain = known and (len(known) == len(scores) or max(known) == 1.0)
        best.append(max(known) if is_certain else None)
    return best


def think_answer_tags(
    prompts: Sequence[Any], completions: Sequence[Completion], **_: Any
) -> list[float]:
    """Returns 1 if the completion is ``<think>...</think><answer>...</answer>`` and nothing else.

    Each tag must occur once, and both parts must have visible text. White space around them is ignored.
    """
    matches = [_THINK_ANSWER.fullmatch(completion_text(completion)) for completion in completions]
    return [
        float(match is not None and all(any(map(_is_visible, part)) for part in match.groups()))
        for match in matches
    ]


def environment(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    environment_reward: Sequence[float | None],
    **_: Any,
) -> list[float | None]:
    """Returns the rewards that ``rollout.environment`` or an agent gave; ``None`` where it gave none."""
    return list(environment_reward)


BUILTIN: dict[str, Callable[..., Sequence[float | None]]] = {
    "agent": environment,
    "boxed_math": boxed_math,
    "environment": environment,
    "exact_match": exact_match,
    "last_number": last_number,
    "partial_match": partial_match,
    "think_answer_tags": think_answer_tags,
}
QUICK = BUILTIN.keys() - {"boxed_math"}
"""Functions that take no time, and may run in several threads."""


def completion_text(completion: Completion) -> str:
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)


def _matching_fraction(text: str, expected: str) -> float:
    longest = max(len(text), len(expected))
    if longest == 0:
        return 1.0
    return sum(a == b for a, b in zip(text, expected, strict=False)) / longest


def _equal_answers(text: str, expected: str) -> float | None:
    given = final_answer(text)
    if not given:
        return 0.0
    try:
        return float(same_answer(given, read_expected(expected)))
    except OutOfTime:
        return None


@functools.lru_cache(maxsize=1024)
def _is_comparable(expected: str) -> bool:
    """Whether an expected answer can be compared with a simple answer within the time limit."""
    return _equal_answers("#### 1", expected) is not None


def _is_visible(character: str) -> bool:
    """Whether a character is a letter, digit, punctuation mark or symbol that is visible in print."""
    return unicodedata.category(character)[0] in "LNPS" and character not in _BLANK
