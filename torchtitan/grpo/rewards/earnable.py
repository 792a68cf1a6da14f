# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds prompts whose reward no completion can earn, before they cost a run its groups."""

from collections.abc import Callable, Sequence

from torchtitan.grpo.rewards.builtin import read_expected
from torchtitan.grpo.rewards.gold_answers import COLUMN, Example
from torchtitan.grpo.rewards.gold_values import right_answers

# For each function, the shortest completion that earns the whole reward, made from the answer;
# None where a part of the answer earns a part of the reward.
_SHORTEST: dict[str, Callable[[str], str] | None] = {
    "boxed_math": lambda answer: f"####{read_expected(answer)}",
    "exact_match": str.strip,
    "partial_match": None,
}


def unearnable_warning(
    function: str,
    examples: Sequence[Example],
    key: str,
    count_tokens: Callable[[str], int],
    max_new_tokens: int,
) -> str | None:
    """Says for how many prompts a built-in reward cannot be earned.

    Args:
        function: Name of the reward function. Functions that do not compare with the column
            ``answer`` are not checked.
        examples: The first prompts of one set.
        key: TOML key of the data set's path, for the message.
        count_tokens: Number of tokens of a text.
        max_new_tokens: ``rollout.max_new_tokens``.

    Returns:
        A warning with an example and the remedy, or ``None``.
    """
    if function not in _SHORTEST:
        return None
    shortest = _SHORTEST[function]
    empty, too_long = [], []
    for example in examples:
        answers = right_answers(example.prompt.columns.get(COLUMN))
        if not any(answer.strip() for answer in answers):
            empty.append(example)
        elif shortest is not None and all(
            count_tokens(shortest(answer)) > max_new_tokens for answer in answers
        ):
            too_long.append(example)
    if not empty and not too_long:
        return None
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
    return (
        f"{key}: {function} cannot be earned in {len(empty) + len(too_long)} of the first "
        f"{len(examples)} rows, whatever the model writes, so that nothing is learned from them: "
        f"{'; '.join(causes)}."
    )
