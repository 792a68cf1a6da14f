# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reward functions that come with the trainer, in TRL's signature.

Lists of equal length have one entry for each completion. A completion is a string or, for a
conversational prompt, a list with one message of the assistant. ``answer`` is from the data set.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan.grpo.rewards.gold_values import right_answers
from torchtitan.grpo.rewards.math_answers import OutOfTime, same_answer

Completion = str | list[dict[str, str]]

_THINK_ANSWER = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# A box with what it holds, or up to the brace before what it holds.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s{$\\]+|\\[A-Za-z]+[^\s$]*))")
# The last "answer is", "answer:" or "answer =" of a text, and what follows without its full stop.
_LEAD_IN = re.compile(r".*\banswer\s*(?:is\s*:?|:|=)\s*(\S.*?)\.?\s*", re.DOTALL | re.IGNORECASE)


def exact_match(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Returns 1 if the completion equals the answer but for white space around both, else 0.

    Any of a list of answers counts; without one it returns ``None`` (see `gold_values`).
    """
    return _best(completions, answer, lambda text, right: float(text.strip() == right.strip()))


def partial_match(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """Returns the fraction of positions at which the completion has the answer's character.

    Equal positions are divided by the longer of both lengths. White space around both texts is
    ignored. Of a list of answers the closest one counts.

    Example: answer ``4321``. ``4321`` earns 1, ``4329`` earns 3/4, ``43`` earns 2/4, ``432100``
    earns 4/6, ``1234`` earns 0.
    """
    return _best(
        completions, answer, lambda text, right: _matching_fraction(text.strip(), right.strip())
    )


def boxed_math(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    r"""Returns 1 if the completion's final answer is mathematically equal to the expected one.

    The final answer is the content of the last ``\boxed{...}``, or else what follows the last
    ``####``; a completion with neither earns 0. The expected answer, any of a list, is read
    likewise, then after ``The answer is``, and as a whole if it has none of these. ``1/2``, ``0.5``
    and ``\frac{1}{2}`` are equal (see `math_answers`). A completion that cannot be compared within
    the limit of processor time receives ``None``.
    """
    return _best(completions, answer, _equal_answers)


def _best(
    completions: Sequence[Completion],
    answers: Sequence[Any],
    score: Callable[[str, str], float | None],
) -> list[float | None]:
    """The best score of each completion over its right answers; ``None`` if one is unknown."""
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

    Each tag must occur once, and neither part may be empty. White space around them is ignored.
    """
    return [float(_has_think_answer_form(completion_text(c))) for c in completions]


def environment(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    environment_reward: Sequence[float | None],
    **_: Any,
) -> list[float | None]:
    """Returns what ``rollout.environment``, or an agent, gave; ``None`` where it gave none."""
    return list(environment_reward)


BUILTIN: dict[str, Callable[..., Sequence[float | None]]] = {
    "agent": environment,
    "boxed_math": boxed_math,
    "environment": environment,
    "exact_match": exact_match,
    "partial_match": partial_match,
    "think_answer_tags": think_answer_tags,
}
QUICK = BUILTIN.keys() - {"boxed_math"}
"""Functions that take no time, and may run in several threads."""


def completion_text(completion: Completion) -> str:
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)


def final_answer(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}``, else the rest of the line after ``####``.

    ``\boxed 5`` and ``\fbox{5}`` are boxes too. Of nested boxes, the inner ``\boxed`` command is
    removed and its content kept. Returns ``None`` if the text has neither.
    """
    last, end, content = None, 0, None
    for box in _BOX.finditer(text):
        if last is None or box.start() >= end:
            last, content = box, box[1] if box[1] is not None else _braced(text, box.end())
            end = box.end() + len(content or "")
    if last is not None:
        return content and re.sub(r"\\(?:boxed|fbox)\s*(?=\{)", "", content)
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def read_expected(answer: str) -> str:
    r"""Returns a column's final answer, else what follows "answer is", else the whole text.

    Example: ``She has 6*7.\n#### 42`` and ``The answer is 42.`` give ``42``.
    """
    final = final_answer(answer)
    if final:
        return final
    lead_in = _LEAD_IN.fullmatch(answer)
    return lead_in[1] if lead_in is not None else answer.strip()


def _braced(text: str, start: int) -> str | None:
    """The text from ``start`` to the brace that closes the one before ``start``."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return None


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


def _has_think_answer_form(text: str) -> bool:
    match = _THINK_ANSWER.fullmatch(text)
    return (
        match is not None
        and all(text.count(tag) == 1 for tag in _TAGS)
        and all(part.strip() for part in match.groups())
    )
