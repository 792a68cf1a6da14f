# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reward functions that come with the trainer, in TRL's signature.

Each is given lists of equal length, one entry a completion; the column ``answer`` is
the data set's. Completions are strings, or for conversational prompts lists with one
message of the assistant.
"""

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
    """1 where the completion is the answer, apart from white space around either."""
    return [
        float(completion_text(completion).strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def partial_match(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[Any], **_: Any
) -> list[float]:
    """Fraction of positions at which the completion has the answer's character.

    The number of equal positions is divided by the longer of the two lengths, so neither
    a missing nor a superfluous character is free. White space around either is ignored.

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
    r"""1 where the completion's final answer equals the expected one, as mathematics.

    The final answer is the last ``\boxed{...}``, else what follows the last ``####``;
    a completion with neither earns 0. The expected answer is read in the same way, and
    is taken whole where it has neither, so GSM8K's ``answer`` column can be used as it
    is. Equality is math-verify's: ``1/2``, ``0.5`` and ``\frac{1}{2}`` are equal.
    """
    return [
        float(_equal_answers(completion_text(completion), str(expected)))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def think_answer_tags(
    prompts: Sequence[Any], completions: Sequence[Completion], **_: Any
) -> list[float]:
    """1 where the completion is ``<think>...</think><answer>...</answer>`` and no more.

    White space may stand around the two parts; each tag occurs once; neither part may
    be empty.
    """
    return [float(_has_think_answer_form(completion_text(c))) for c in completions]


def environment(
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    environment_reward: Sequence[float | None],
    **_: Any,
) -> list[float | None]:
    """What the environment gave (``rollout.environment``); unscored where it gave nothing."""
    return list(environment_reward)


BUILTIN: dict[str, Callable[..., Sequence[float | None]]] = {
    "boxed_math": boxed_math,
    "environment": environment,
    "exact_match": exact_match,
    "partial_match": partial_match,
    "think_answer_tags": think_answer_tags,
}


def completion_text(completion: Completion) -> str:
    """The text of a completion, conversational or not."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)


def final_answer(text: str) -> str | None:
    r"""Contents of the last ``\boxed{...}``, else the rest of the line after ``####``."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        return _braced(text, start + len("\\boxed{"))
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def read_expected(answer: str) -> str:
    """The expected answer in a column: its final answer, what follows "answer is", or all of it.

    Example: ``She has 6*7.\\n#### 42`` and ``The answer is 42.`` give ``42``.
    """
    final = final_answer(answer)
    if final:
        return final
    lead_in = _LEAD_IN.fullmatch(answer)
    return lead_in[1] if lead_in is not None else answer.strip()


def _braced(text: str, start: int) -> str | None:
    """From ``start`` up to the brace that closes what was opened just before it."""
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
    # Imported late: it costs every worker half a second, used or not.
    from math_verify import parse, verify

    parsed = [
        parse(f"\\boxed{{{a}}}", parsing_timeout=_MATH_TIMEOUT_SECONDS) for a in (wanted, given)
    ]
    return bool(verify(parsed[0], parsed[1], timeout_seconds=_MATH_TIMEOUT_SECONDS))


def _has_think_answer_form(text: str) -> bool:
    match = _THINK_ANSWER.fullmatch(text)
    return (
        match is not None
        and all(text.count(tag) == 1 for tag in _TAGS)
        and all(part.strip() for part in match.groups())
    )
