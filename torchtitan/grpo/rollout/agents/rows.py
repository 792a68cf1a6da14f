# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The training rows of one episode, in exactly the tokens that servers were sent and wrote.

A request whose context begins with all tokens of a row continues that row. Any other one begins a
row with its whole context, of which nothing is trained. So each token that the model wrote is
trained once, in the row of the request that it answered::

    requests  q -> a          q a o -> b      (continues)      q a p -> c    (a branch)
    rows      q [a] o [b]                                      q a p [c]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torchtitan.grpo.types import FinishReason, Generation, joined, unsampled


@dataclass(eq=False)
class Row:
    """``token_ids`` are all its tokens; ``whole`` lacks the prompt of the data set.

    The ``reward`` was given for the answer ``rewarded``.
    """

    token_ids: list[int] = field(default_factory=list)
    whole: Generation | None = None
    is_busy: bool = False
    reward: float | None = None
    rewarded: str = ""


class EpisodeRows:
    """A completion whose rows grow side by side. ``prompt_ids`` are the prompt of its group."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self._prompt_ids = prompt_ids
        self._prompt_row: Row | None = None
        self._others: list[Row] = []
        self._last_reason: FinishReason = "stop"

    def place(self, context: list[int]) -> Row:
        """Returns the row that a request with this context continues, or a new one.

        The row is busy until :meth:`add` or :meth:`release`: a request beside it, with the same
        context, begins a row.
        """
        free = [row for row in self._rows() if not row.is_busy]
        fitting = [row for row in free if context[: len(row.token_ids)] == row.token_ids]
        row = max(fitting, key=lambda one: len(one.token_ids), default=None) or self._new(context)
        row.is_busy = True
        return row

    def add(self, row: Row, context: list[int], answer: Generation) -> None:
        """Appends what the model was shown since the row's end, and what it then wrote."""
        shown = context[len(row.token_ids) :]
        if shown:
            version = answer.segments[0].version
            part = unsampled(shown, version, begins_row=not row.token_ids)
            row.whole = joined(row.whole, part)
        row.whole = joined(row.whole, answer)
        row.token_ids = [*context, *answer.token_ids.tolist()]
        row.is_busy = False
        self._last_reason = answer.finish_reason

    def release(self, row: Row) -> None:
        """Frees a row whose request was not answered."""
        row.is_busy = False

    @property
    def num_rows(self) -> int:
        return sum(row.whole is not None for row in self._rows())

    def whole(self, reward: float | None) -> Generation | None:
        """Joins the rows without rewards of their own; ``None`` if no request was answered."""
        written = [(row.whole, row.reward) for row in self._rows() if row.whole is not None]
        common = [whole for whole, own in written if own is None]
        apart = [replace(w, environment_reward=own) for w, own in written if own is not None]
        if not common:
            return replace(apart[0], apart=tuple(apart[1:])) if apart else None
        return replace(
            _all_joined(common),
            finish_reason=self._last_reason,
            environment_reward=reward,
            apart=tuple(apart),
        )

    def _rows(self) -> list[Row]:
        return [*([self._prompt_row] if self._prompt_row else []), *self._others]

    def _new(self, context: list[int]) -> Row:
        begins_with_prompt = context[: len(self._prompt_ids)] == self._prompt_ids
        if begins_with_prompt and self._prompt_row is None:
            self._prompt_row = Row(list(self._prompt_ids))
            return self._prompt_row
        self._others.append(Row())
        return self._others[-1]


def _all_joined(rows: Sequence[Generation]) -> Generation:
    """By halves, because one after the other would copy the first row once for each other one."""
    if len(rows) == 1:
        return rows[0]
    middle = len(rows) // 2
    return joined(_all_joined(rows[:middle]), _all_joined(rows[middle:]))
