# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Finds expected answers that no completion can match, before they cost a run its reward.

A row without an answer that can be compared with is refused (:func:`gold_problem`). Prose is allowed:
``boxed_math`` and ``exact_match`` compare a completion's answer with the column ``answer``. If
that column says ``There are 42 apples left``, the right number alone earns 0 in every group, and
nothing fails. The check below therefore has the reward function score the number of such answers
at the start of a run, and says so if it earns 0.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.rewards.answer_kinds import FORMULA_WORD
from torchtitan.grpo.rewards.answer_text import TEXT
from torchtitan.grpo.rewards.builtin import read_expected
from torchtitan.grpo.rewards.gold_values import COLUMN, answer_problem, right_answers
from torchtitan.grpo.rewards.scoring_pool import RewardPool, ScoringFailed
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.frames import PLAIN_DATA, unsendable_column

MAX_ROWS = 128
"""Rows of each prompt set that are looked at, from its beginning."""

# For each function, what it reads as the expected answer, and a completion with the number.
_READERS: dict[str, tuple[Callable[[str], str], str]] = {
    "boxed_math": (read_expected, "\\boxed{%s}"),
    "exact_match": (str.strip, "%s"),
}
_COMPARING = (*_READERS, "partial_match", "torchtitan.grpo.rewards.gsm8k:hash_answer_exact")
_MAX_TRIALS = 4

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_LATEX_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True)
class Example:
    """A prompt with its place in the data set, such as ``train.jsonl:7``."""

    where: str
    prompt: Prompt


def gold_problem(function: str, columns: Mapping[str, Any]) -> str | None:
    """Says why a reward function that comes with the trainer cannot use the ``answer`` of a row.

    Args:
        function: Name of the reward function. Functions of the user may read any value.
        columns: The columns of the row.

    Returns:
        What is wrong and what to do; ``None`` if the value is understood.
    """
    if function.replace("gsm8k.hash", "gsm8k:hash") not in _COMPARING:
        return None
    return answer_problem(columns, function)


def gold_judge(functions: Sequence[str]) -> Callable[[Mapping[str, Any]], str | None]:
    """Returns what judges the rows of a set for its reward functions.

    Besides :func:`gold_problem`, a column must hold what can be passed to a reward function at all. A set
    whose first row has no column ``answer`` is not judged by it: the reward functions are tried on
    that row, and the message then names the columns that there are.
    """
    first: list[Mapping[str, Any]] = []

    def judge(columns: Mapping[str, Any]) -> str | None:
        if not first:
            first.append(columns)
        found = unsendable_column(columns)
        if found is not None:
            return f"{found}. {PLAIN_DATA}"
        if COLUMN not in first[0]:
            return None
        problems = (gold_problem(function, columns) for function in functions)
        return next((problem for problem in problems if problem is not None), None)

    return judge


def number_in_prose(answer: str) -> str | None:
    r"""The last number of an expected answer that also holds words, else ``None``.

    LaTeX commands, ``\text{...}`` and the names of functions are not words.

    Example: ``There are 42 apples`` gives ``42``; ``x = 42``, ``5 \text{ cm}``, ``3 or 4`` and
    ``Paris`` give ``None``.
    """
    text = _LATEX_COMMAND.sub(" ", TEXT.sub(" ", answer))
    numbers = _NUMBER.findall(text)
    has_words = any(
        word != "in" and not FORMULA_WORD.fullmatch(word.lower()) for word in _WORD.findall(text)
    )
    return numbers[-1] if numbers and has_words else None


async def prose_warning(
    pool: RewardPool, position: int, examples: Sequence[Example], key: str
) -> str | None:
    """Says that the right number earns 0 for some expected answers.

    Args:
        pool: Started pool.
        position: Position of the reward function in the pool. Functions other than
            ``boxed_math`` and ``exact_match`` are not checked: they may read any answer.
        examples: The first prompts of one set.
        key: TOML key of the data set's path, for the message.

    Returns:
        A warning with an example and the remedy, or ``None``.
    """
    function = pool.functions[position]
    if function not in _READERS:
        return None
    read, form = _READERS[function]
    found: list[tuple[Example, str]] = []
    for example in examples:
        answers = right_answers(example.prompt.columns.get(COLUMN))
        numbers = [number_in_prose(read(text)) for text in answers]
        # Of several answers, one that can be given is enough.
        if numbers and None not in numbers:
            number = numbers[0]
            found.append((example, form % number))
    for example, completion in found[:_MAX_TRIALS]:
        if await _score(pool, position, example.prompt, completion) == 0.0:
            return (
                f"{key}: the column {COLUMN!r} holds words around a number in {len(found)} of the "
                f"first {len(examples)} rows, and {function} gives no reward for the number "
                f"alone. For example, the completion {completion!r} earns 0 in {example.where}, "
                f"whose answer is {str(example.prompt.columns[COLUMN])!r:.200}. Write the bare "
                "answer into the column, in \\boxed{} or after ####, or take another column with "
                "prompts.rename, or use a reward function of your own. Ignore this warning if the "
                "whole text is the answer."
            )
    return None


async def _score(pool: RewardPool, position: int, prompt: Prompt, completion: str) -> float | None:
    try:
        return await pool.try_out(prompt, completion, position)
    except ScoringFailed:
        return None  # counted and reported if it happens in training
