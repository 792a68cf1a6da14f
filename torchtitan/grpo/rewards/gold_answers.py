# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Warns of expected answers for which a built-in reward can hardly be earned, before training.

If the column ``answer`` says ``There are 42 apples left``, the right number earns 0 in every
group, and nothing fails: the reward function therefore scores the number of such answers. And no
completion earns anything for an empty answer, or for one that is longer than a completion may be.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan.grpo.rewards.answer_kinds import FORMULA_WORD
from torchtitan.grpo.rewards.answer_text import TEXT
from torchtitan.grpo.rewards.builtin import read_expected
from torchtitan.grpo.rewards.gold_values import COLUMN, right_answers
from torchtitan.grpo.rewards.scoring_pool import RewardPool, ScoringFailed
from torchtitan.grpo.types import Prompt

MAX_ROWS = 128
"""Rows of each prompt set that are looked at, from its beginning."""

# For each function, what it reads as the expected answer, a completion with the number in its place,
# and the shortest completion that earns the whole reward.
_READERS: dict[str, tuple[Callable[[str], str], str, str]] = {
    "boxed_math": (read_expected, "\\boxed{%s}", "####%s"),
    "exact_match": (str.strip, "%s", "%s"),
}
_MAX_TRIALS = 4

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_LATEX_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True)
class Example:
    """A prompt with its place in the data set, such as ``train.jsonl:7``."""

    where: str
    prompt: Prompt

    @property
    def answers(self) -> list[str]:
        """Its expected answers."""
        return right_answers(self.prompt.columns.get(COLUMN))


async def answer_warnings(
    pool: RewardPool,
    position: int,
    examples: Sequence[Example],
    key: str,
    count_tokens: Callable[[str], int],
    max_new_tokens: int,
) -> list[str]:
    """Returns warnings with an example and the remedy.

    Args:
        pool: Started pool.
        position: Position of the reward function in the pool.
        examples: The first prompts of one set.
        key: TOML key of the data set's path, for the message.
        count_tokens: Number of tokens of a text.
        max_new_tokens: Longest completion.
    """
    function = pool.functions[position]
    warning = await _prose_warning(pool, position, examples, key)
    if warning is None:
        warning = unearnable_warning(function, examples, key, count_tokens, max_new_tokens)
    return [] if warning is None else [warning]


def number_in_prose(answer: str) -> str | None:
    r"""Returns the last number of an expected answer that also holds words, else ``None``.

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


async def _prose_warning(
    pool: RewardPool, position: int, examples: Sequence[Example], key: str
) -> str | None:
    """Warns if the bare number earns 0 for some expected answers; see :func:`answer_warnings`."""
    function = pool.functions[position]
    if function not in _READERS:
        return None
    read, form, _ = _READERS[function]
    found: list[tuple[Example, str]] = []
    for example in examples:
        numbers = [number_in_prose(read(text)) for text in example.answers]
        # Of several answers, one that can be given is enough.
        if numbers and None not in numbers:
            found.append((example, form % numbers[0]))
    for example, completion in found[:_MAX_TRIALS]:
        try:
            reward = await pool.try_out(example.prompt, completion, position)
        except ScoringFailed:
            continue  # counted and reported if it happens in training
        if reward == 0.0:
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


def unearnable_warning(
    function: str,
    examples: Sequence[Example],
    key: str,
    count_tokens: Callable[[str], int],
    max_new_tokens: int,
) -> str | None:
    """Warns of prompts whose reward no completion can earn; see :func:`answer_warnings`."""
    if function not in (*_READERS, "partial_match"):
        return None
    empty, too_long = [], []
    for example in examples:
        answers = example.answers
        if not any(answer.strip() for answer in answers):
            empty.append(example)
        elif (
            function in _READERS
        ):  # a part of the answer earns a part of the reward of partial_match
            read, _, form = _READERS[function]
            if all(count_tokens(form % read(answer)) > max_new_tokens for answer in answers):
                too_long.append(example)
    causes = []
    if empty:
        causes.append(
            f"the column {COLUMN!r} is empty in {len(empty)} of them (for example in "
            f"{empty[0].where}); fill it, remove these rows, or take another column with prompts.rename"
        )
    if too_long:
        causes.append(
            f"the expected answer is longer than rollout.max_new_tokens ({max_new_tokens}) in "
            f"{len(too_long)} of them (for example in {too_long[0].where}); raise "
            "rollout.max_new_tokens, or take the bare answers"
        )
    if not causes:
        return None
    return (
        f"{key}: {function} cannot be earned in {len(empty) + len(too_long)} of the first "
        f"{len(examples)} rows, whatever the model writes, so that nothing is learned from them: "
        f"{'; '.join(causes)}."
    )
