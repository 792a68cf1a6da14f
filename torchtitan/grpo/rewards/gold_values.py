# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads the right answers in the column ``answer`` of a row, and finds rows whose answers are unusable."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan.grpo.rewards.final_answers import expected_number, read_expected
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.channel import PLAIN_DATA, unsendable_column

COLUMN = "answer"
MAX_ROWS = 128
"""Rows of each prompt set that are looked at, from its beginning."""
_SHOWN_CHARS = 80
_LISTS = list | tuple | set | frozenset
_REMEDY = "Correct or remove the row, or take another column with prompts.rename."
# The shortest completion that earns the whole reward, made from the answer; None where a part of the
# answer earns a part of the reward.
_SHORTEST: dict[str, Callable[[str], str] | None] = {
    "boxed_math": lambda answer: f"####{read_expected(answer)}",
    "exact_match": str.strip,
    "last_number": lambda answer: str(expected_number(answer)),
    "partial_match": None,
}
# Functions of the user may read any value.
_COMPARING = (*_SHORTEST, *(f"torchtitan.grpo.rewards.gsm8k{dot}hash_answer_exact" for dot in ":."))


def right_answers(value: Any) -> list[str]:
    """Returns the right answers, as texts, in a value of the column ``answer``; none if it holds none.

    Each element of a list is a right answer. A number gives a text for each of its usual forms, a
    boolean for those of Python and JSON. Arrays and scalars of numpy and pyarrow are read as well.

    Example: ``["1/2", 0.5]`` gives ``1/2`` and ``0.5``, ``21.0`` gives ``21`` and ``21.0``, and
    ``None``, NaN, ``[]`` and ``{}`` give nothing.
    """
    value = _plain(value)
    if isinstance(value, _LISTS):
        return list(dict.fromkeys(text for element in value for text in _texts(_plain(element))))
    return _texts(value)


def gold_judge(functions: Sequence[str]) -> Callable[[Mapping[str, Any]], str | None]:
    """Returns a function that says why these reward functions cannot use a row's columns, if they cannot.

    If the first row has no column ``answer``, that column is never checked: the call of the reward
    functions on that row then fails with a message that names the existing columns.
    """
    first: list[Mapping[str, Any]] = []
    comparing = [function for function in functions if function in _COMPARING]

    def judge(columns: Mapping[str, Any]) -> str | None:
        if not first:
            first.append(columns)
        found = unsendable_column(columns)
        if found is not None:
            return f"{found}. {PLAIN_DATA}"
        if COLUMN not in first[0] or not comparing:
            return None
        problems = (answer_problem(columns, function) for function in comparing)
        return next(filter(None, problems), None)

    return judge


def answer_problem(columns: Mapping[str, Any], function: str) -> str | None:
    """Returns why a row's ``answer`` is unusable, or None. Each element of a list must be a right answer."""
    if COLUMN not in columns:
        return f"the column {COLUMN!r} is missing, and {function} compares with it. {_REMEDY}"
    value = _plain(columns[COLUMN])
    elements = [_plain(element) for element in value] if isinstance(value, _LISTS) else [value]
    wrong = next(([element] for element in elements if not _texts(element)), [])
    if elements and not wrong:
        return _number_problem(value) if function == "last_number" else None
    what = _describe(wrong[0]) if wrong else "an empty list"
    where = " within a list" if wrong and isinstance(value, _LISTS) else ""
    remedy = _REMEDY
    if wrong and isinstance(wrong[0], Mapping) and wrong[0]:
        path = f"{COLUMN}.{next(iter(wrong[0]))}"
        remedy = f'Name the value within it, such as prompts.rename = {{ "{path}" = "{COLUMN}" }}.'
    return (
        f"the column {COLUMN!r} is {what}{where}, and {function} compares with it. It must be a text, a "
        f"number, true or false, or a list of those, of which each is a right answer. {remedy}"
    )


def unearnable_warning(
    function: str,
    examples: Sequence[Prompt],
    key: str,
    count_tokens: Callable[[str], int],
    max_new_tokens: int,
) -> str | None:
    """Returns a warning if no completion of some examples can earn the reward ``function``.

    ``key`` is the setting that names the examples' file.
    """
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


def _number_problem(answer: Any) -> str | None:
    unread = [text for text in right_answers(answer) if expected_number(text) is None]
    if not unread:
        return None
    return (
        f"the column {COLUMN!r} is {_describe(unread[0])}, and last_number compares with its number. Each "
        f"right answer must hold one number, such as 57 or $1,234.50; boxed_math compares formulas as well. {_REMEDY}"
    )


def _plain(value: Any) -> Any:
    for method in ("as_py", "tolist"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, bytes):
        try:
            return [value.decode()]
        except UnicodeDecodeError:
            return []
    if isinstance(value, bool):
        return [str(value), str(value).lower()]
    if isinstance(value, int):
        return [str(value)]
    # Decimal and Fraction too; complex numbers have no such method.
    if not hasattr(value, "__float__") or not math.isfinite(value):
        return []
    whole = [str(int(value))] if value == int(value) else []
    return [*whole, str(value)]


def _describe(value: Any) -> str:
    if value is None or value != value:
        return "null" if value is None else "NaN"
    return f"{value!r:.{_SHOWN_CHARS}} of type {type(value).__name__}"
