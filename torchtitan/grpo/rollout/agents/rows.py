# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The training rows of one episode, with exactly the tokens that servers received and generated.

A request whose context begins with all tokens of a row continues that row. Any other request begins
a row with its whole context, which is not trained on. So each token that the model wrote is
trained on once, in the row of the request that it answered::

    requests  q -> a          q a o -> b      (continues)      q a p -> c    (a branch)
    rows      q [a] o [b]                                      q a p [c]
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from torchtitan.grpo.types import (
    FinishReason,
    Generation,
    VersionSegment,
    columns_of,
    joined,
    unsampled,
)


@dataclass(eq=False)
class Row:
    """One training row. ``token_ids`` are all its tokens, ``whole`` those after the data set's prompt.

    ``rewarded`` is the id of the answer for which ``reward`` was given.
    """

    token_ids: list[int] = field(default_factory=list)
    whole: Generation | None = None
    is_busy: bool = False
    reward: float | None = None
    rewarded: str = ""


class EpisodeRows:
    """The rows of one completion, which grow in parallel. ``prompt_ids`` are the prompt of its group."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self._prompt_ids = prompt_ids
        self._prompt_row: Row | None = None
        self._others: list[Row] = []
        self._last_reason: FinishReason = "stop"

    def place(self, context: list[int]) -> Row:
        """Returns the row that a request with this context continues, or a new one.

        The row is busy until :meth:`add` or :meth:`release` is called. Meanwhile, another request with
        the same context begins a new row.
        """
        free = [row for row in self._rows() if not row.is_busy]
        fitting = [row for row in free if context[: len(row.token_ids)] == row.token_ids]
        row = max(fitting, key=lambda one: len(one.token_ids), default=None) or self._new(context)
        row.is_busy = True
        return row

    def add(self, row: Row, context: list[int], answer: Generation) -> None:
        """Extends a row by the rest of a request's context and by the model's answer."""
        row.whole = _longer(row, context, answer)
        row.token_ids = [*context, *answer.token_ids.tolist()]
        row.is_busy = False
        self._last_reason = answer.finish_reason

    def release(self, row: Row) -> None:
        """Frees a row whose request was not answered."""
        row.is_busy = False

    def cut(self) -> None:
        """Notes that the completion ends early, whatever the finish reason of its last answer."""
        self._last_reason = "length"

    @property
    def num_rows(self) -> int:
        return sum(row.whole is not None for row in self._rows())

    def whole(self, reward: float | None) -> Generation | None:
        """Joins the rows, except those with their own rewards. ``None`` if no request was answered."""
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

    def with_part(self, row: Row, context: list[int], part: Generation) -> Generation:
        """Returns the completion so far, with an unfinished answer, ``part``, added to ``row``."""
        rows = [_longer(row, context, part) if one is row else one.whole for one in self._rows()]
        whole = _all_joined([one for one in rows if one is not None])
        return replace(whole, finish_reason=part.finish_reason)

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
    """Joins rows by halves: adding them one by one would copy the first row again and again."""
    if len(rows) == 1:
        return rows[0]
    middle = len(rows) // 2
    return joined(_all_joined(rows[:middle]), _all_joined(rows[middle:]))


def _longer(row: Row, context: list[int], answer: Generation) -> Generation:
    shown, whole = context[len(row.token_ids) :], row.whole
    if shown:
        # What was shown belongs to the version of the tokens before it.
        version = answer.segments[0].version if whole is None else whole.segments[-1].version
        whole = joined(whole, unsampled(shown, version, begins_row=not row.token_ids))
    return joined(whole, answer)


def part_of(whole: Generation, start: int, end: int) -> Generation:
    """Returns the tokens ``[start, end)`` of a row."""
    segments = [
        VersionSegment(version, max(first, start) - start, min(last, end) - start)
        for version, first, last in whole.segments
        if first < end and last > start
    ]
    columns = {name: getattr(whole, name) for name in columns_of(Generation)}
    columns = {name: None if one is None else one[start:end] for name, one in columns.items()}
    kept = replace(whole, segments=tuple(segments), environment_reward=None, new_rows=())
    return replace(kept, num_context=0, **columns)


class Replay:
    """The answers of an interrupted episode, for reuse when it begins again and sends the same requests.

    A turn ends with a stop token, because no server generates past one, or before a token that was
    not sampled::

        token_ids   3 * 4 = 1 2 . <eos>
        sampled     1 1 1 1 0 0 1 1
        turns       [3 * 4 =] shown [1 2], [. <eos>]
    """

    def __init__(
        self, prompt_ids: list[int], written: Generation, stop_token_ids: Collection[int]
    ) -> None:
        self._written, self._stop_ids = written, frozenset(stop_token_ids)
        self._num_left = written.num_trained
        self.has_diverged = False
        ids = written.token_ids.tolist()
        starts = [start for start, _ in written.new_rows]
        places = zip([0, *starts], [*starts, len(ids)], strict=True)
        self._rows = [(prompt_ids if i == 0 else [], *place) for i, place in enumerate(places)]
        self._ids = ids

    def answer(self, context: list[int]) -> Generation | None:
        """Returns the turn, complete or not, that the interrupted episode wrote after this context.

        Returns None if there is none, and from then on always: all later turns are generated anew.
        """
        for before, start, end in self._rows if self._num_left and not self.has_diverged else ():
            place = start + len(context) - len(before)
            is_known = start <= place < end and context == [*before, *self._ids[start:place]]
            if is_known and (found := self._turn(place, end)) is not None:
                self._num_left -= len(found.token_ids)
                return found
        self.has_diverged = self.has_diverged or self._num_left > 0
        return None

    def _turn(self, begin: int, row_end: int) -> Generation | None:
        sampled, end = self._written.sampled, begin
        while end < row_end and (sampled is None or sampled[end]):
            end += 1
            if self._ids[end - 1] in self._stop_ids:
                break
        if end == begin:
            return None
        is_last = end == len(self._ids) and self._ids[-1] not in self._stop_ids
        reason = self._written.finish_reason if is_last else "stop"
        return replace(part_of(self._written, begin, end), sampled=None, finish_reason=reason)
