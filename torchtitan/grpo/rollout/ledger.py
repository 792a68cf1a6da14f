# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

r"""Records what happened to each prompt: it is trained on once, or closed with a reason.

::

    not yet issued --issue--> OPEN --train--> trained
                                \---close--> closed, with a reason

Invariant: every issued index is open, trained or closed, and never two of these. Trained and
closed are final. A run that is resumed issues the open prompts first. Every checkpoint contains the
ledger's state after exactly those batches that were trained on.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from torchtitan.grpo.types import PromptProgress

CloseReason = Literal[
    "too long", "unusable", "failed", "unscored", "unrated", "expired", "overdue", "filtered"
]
"""The reason why a group is not trained on:

- ``too long``: the prompt exceeds ``prompts.max_prompt_tokens``.
- ``unusable``: the row is no prompt, which the check before training has not found.
- ``failed``: the servers returned fewer than two usable completions.
- ``unscored``: fewer than two completions have a reward.
- ``unrated``: no teacher rated all of its rollouts (``[teacher]``).
- ``expired``: a server generated tokens with older weights than it was attested to have.
- ``overdue``: the batch in which the group was due did not wait for it (``rollout.overdue``).
- ``filtered``: a filter of ``[rollout]`` left fewer than two completions, or left rewards that
  are all equal.
"""


class Ledger:
    """Tracks the state of all issued prompts. ``closed`` are those closed since the last batch."""

    def __init__(
        self, progress: PromptProgress, closed: dict[int, CloseReason] | None = None
    ) -> None:
        self._position = progress.position
        self._open = set(progress.open)
        # A resumed run issues the open prompts again, which must not count as new prompts.
        self._to_reissue = set(progress.open)
        self.closed: dict[int, CloseReason] = dict(closed or {})

    @property
    def progress(self) -> PromptProgress:
        return PromptProgress(self._position, tuple(sorted(self._open)))

    def issue(self, index: int, skipped: Mapping[int, CloseReason] = MappingProxyType({})) -> None:
        """Records that a prompt was drawn. New prompts are issued in ascending order.

        The indices between the last new prompt and this one are closed for their reasons in ``skipped``, or
        else as too long.
        """
        if index in self._to_reissue:
            self._to_reissue.discard(index)
            return
        assert index >= self._position, f"prompt {index} must be issued only once"
        for passed in range(self._position, index):
            self.closed[passed] = skipped.get(passed, "too long")
        self._open.add(index)
        self._position = index + 1

    def close(self, index: int, reason: CloseReason) -> None:
        self._open.remove(index)
        self.closed[index] = reason

    def train(self, indices: Iterable[int]) -> None:
        """Records that open prompts were delivered to the trainer."""
        trained = set(indices)
        assert trained <= self._open, f"prompts {sorted(trained - self._open)} are not open"
        self._open -= trained

    def take_closed(self) -> dict[int, CloseReason]:
        closed, self.closed = self.closed, {}
        return closed
