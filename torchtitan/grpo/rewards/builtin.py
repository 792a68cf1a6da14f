# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reward functions that come with the trainer, in TRL's signature.

Each function is called with lists of equal length, which have one entry for each completion. The
column ``answer`` comes from the data set. A completion is a string or, for a conversational
prompt, a list with one message of the assistant.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan.grpo.rewards.thousands import without_thousands_separators

Completion = str | list[dict[str, str]]

_THINK_ANSWER = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# The last "answer is", "answer:" or "answer =" of a text, and what follows without its full stop.
_LEAD_IN = re.compile(r".*\banswer\s*(?:is\s*:?|:|=)\s*(\S.*?)\.?\s*", re.DOTALL | re.IGNORECASE)
_MATH_TIMEOUT_SECONDS = 3


def exact_match(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float]:
    """Returns 1 if the completion equals the answer, ignoring white space around both, else 0."""
    return [
        float(completion_text(completion).strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def partial_match(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float]:
    """Returns the fraction of positions at which the completion has the answer's character.

    The number of equal positions is divided by the longer of the two lengths, so both missing
    and superfluous characters lower the reward. White space around both texts is ignored.

    Example: answer ``4321``. ``4321`` earns 1, ``4329`` earns 3/4, ``43`` earns 2/4,
    ``432100`` earns 4/6, ``1234`` earns 0.
    """
    return [
        _matching_fraction(completion_text(completion).strip(), str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def boxed_math(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float]:
    r"""Returns 1 if the completion's final answer is mathematically equal to the expected one.

    The final answer is the content of the last ``\boxed{...}``, or else what follows the last
    ``####``; a completion with neither earns 0. The expected answer is read in the same way, then
    after ``The answer is``, and as a whole if it has none of these, so GSM8K's column ``answer``
    can be used unchanged. Thousands separators are ignored; otherwise math-verify decides what is
    equal: ``1/2``, ``0.5`` and ``\frac{1}{2}`` are.
    """
    return [
        float(_equal_answers(completion_text(completion), str(expected)))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def think_answer_tags(
    prompts: Sequence[Any], completions: Sequence[Completion], **_: Any
) -> list[float]:
    """Returns 1 if the completion is ``<think>...</think><answer>...</answer>`` and nothing else.

    Each tag must occur once and neither part may be empty. White space around the two parts is
    ignored.
    """
    return [float(_has_think_answer_form(completion_text(c))) for c in completions]


def environment(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    environment_reward: Sequence[float | None],
    **_: Any,
) -> list[float | None]:
    """Returns the rewards that ``rollout.environment`` gave; ``None`` where it gave none."""
    return list(environment_reward)


BUILTIN: dict[str, Callable[..., Sequence[float | None]]] = {
    "boxed_math": boxed_math,
    "environment": environment,
    "exact_match": exact_match,
    "partial_match": partial_match,
    "think_answer_tags": think_answer_tags,
}


def completion_text(completion: Completion) -> str:
    """Returns the text of a completion, conversational or not."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)


def final_answer(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}``, else the rest of the line after ``####``."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        return _braced(text, start + len("\\boxed{"))
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def read_expected(answer: str) -> str:
    """Returns a column's final answer, else what follows "answer is", else the whole text.

    Example: ``She has 6*7.\\n#### 42`` and ``The answer is 42.`` give ``42``.
    """
    final = final_answer(answer)
    if final:
        return final
    lead_in = _LEAD_IN.fullmatch(answer)
    return lead_in[1] if lead_in is not None else answer.strip()


def _braced(text: str, start: int) -> str | None:
    """Returns the text from ``start`` to the brace that closes the one before ``start``."""
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


def _equal_answers(text: str, expected: str) -> bool:
    given = final_answer(text)
    if not given:
        return False
    wanted = read_expected(expected)
    given, wanted = without_thousands_separators(given), without_thousands_separators(wanted)
    # Most answers of most sets are plain numbers, which need no parser.
    if given == wanted:
        return True
    parse, verify = _math_verify()
    parsed = [
        parse(f"\\boxed{{{a}}}", parsing_timeout=_MATH_TIMEOUT_SECONDS) for a in (wanted, given)
    ]
    return bool(verify(parsed[0], parsed[1], timeout_seconds=_MATH_TIMEOUT_SECONDS))


@functools.cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., bool]]:
    """Imports math-verify's functions when they are first needed, which takes seconds."""
    from math_verify import parse, verify

    # The first call builds tables. Its time must not count as that of a user's answer, which
    # earns 0 if it cannot be parsed in time.
    square = parse("\\boxed{x^2}", parsing_timeout=0)  # 0 is no limit
    verify(square, square, timeout_seconds=0)
    return parse, verify


def _has_think_answer_form(text: str) -> bool:
    match = _THINK_ANSWER.fullmatch(text)
    return (
        match is not None
        and all(text.count(tag) == 1 for tag in _TAGS)
        and all(part.strip() for part in match.groups())
    )
