# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Warns of expected answers for which a built-in reward cannot be earned, before training."""

from collections.abc import Callable, Sequence

from torchtitan.grpo.rewards.final_answers import expected_number, read_expected
from torchtitan.grpo.rewards.gold_values import COLUMN, right_answers
from torchtitan.grpo.types import Prompt

MAX_ROWS = 128
"""Rows of each prompt set that are looked at, from its beginning."""

# The shortest completion that earns the whole reward, made from the answer; None where a part of the
# answer earns a part of the reward.
_SHORTEST: dict[str, Callable[[str], str] | None] = {
    "boxed_math": lambda answer: f"####{read_expected(answer)}",
    "exact_match": str.strip,
    "last_number": lambda answer: str(expected_number(answer)),
    "partial_match": None,
}


def unearnable_warning(
    function: str,
    examples: Sequence[Prompt],
    key: str,
    count_tokens: Callable[[str], int],
    max_new_tokens: int,
) -> str | None:
    """Returns a warning with an example, if any; ``key`` is the TOML key of the examples' path."""
    if function not in _SHORTEST:
        return None
    shortest = _SHORTEST[function]
    empty, too_long = [], []
    for example in examples:
        answers = right_answers(example.columns.get(COLUMN))
        if not any(answer.strip() for answer in answers):
            empty.append(example)
        elif shortest and min(count_tokens(shortest(one)) for one in answers) > max_new_tokens:
            too_long.append(example)
    causes = []
    if empty:
        causes.append(
            f"the column {COLUMN!r} is empty in {len(empty)} of them (for example in "
            f"{empty[0].row}); fill it, remove these rows, or take another column with prompts.rename"
        )
    if too_long:
        causes.append(
            f"the expected answer is longer than rollout.max_new_tokens ({max_new_tokens}) in "
            f"{len(too_long)} of them (for example in {too_long[0].row}); raise "
            "rollout.max_new_tokens, or take the bare answers"
        )
    if not causes:
        return None
    return (
        f"{key}: {function} cannot be earned in {len(empty) + len(too_long)} of the first "
        f"{len(examples)} rows, whatever the model writes, so that nothing is learned from them: "
        f"{'; '.join(causes)}."
    )
