# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What becomes of each prompt: it is trained once, or closed with a reason.

::

    not yet issued --issue--> OPEN --train--> trained
                                \\---close--> closed, with a reason

Invariant: the indices that were issued are those that are open, trained or closed, and no
index is two of these. Trained and closed are for ever; what is open when a run ends is where
the next one begins. The ledger's state travels to rank 0 with every batch and stands in
every checkpoint, so it is always that of exactly the batches that were trained on.
"""

from collections.abc import Iterable
from typing import Literal

from torchtitan.grpo.types import PromptProgress

CloseReason = Literal["too long", "failed", "unscored", "expired", "overdue", "filtered"]
"""Why a group is not trained on:

- ``too long``: the prompt exceeds ``prompts.max_prompt_tokens``.
- ``failed``: servers did not write two usable completions.
- ``unscored``: fewer than two completions have a reward.
- ``expired``: a server wrote with older weights than it was attested to have.
- ``overdue``: the batch that it was due in did not wait for it (``rollout.overdue``).
- ``filtered``: a filter of ``[rollout]`` left fewer than two completions, or none to learn
  from.
"""


class Ledger:
    """See the module's docstring.

    Args:
        progress: Of the run until now.
        closed: What an earlier process closed since the last batch.
    """

    def __init__(
        self, progress: PromptProgress, closed: dict[int, CloseReason] | None = None
    ) -> None:
        self._position = progress.position
        self._open = set(progress.open)
        # A resumed run hands out again what was open: it is issued once all the same.
        self._to_reissue = set(progress.open)
        self._closed: dict[int, CloseReason] = dict(closed or {})

    @property
    def progress(self) -> PromptProgress:
        """How far the run is, for the checkpoint."""
        return PromptProgress(self._position, tuple(sorted(self._open)))

    def issue(self, index: int) -> None:
        """A prompt was drawn. New ones come in ascending order; what they skip is too long."""
        if index in self._to_reissue:
            self._to_reissue.discard(index)
            return
        assert index >= self._position, f"prompt {index} was issued before"
        for skipped in range(self._position, index):
            self._closed[skipped] = "too long"
        self._open.add(index)
        self._position = index + 1

    def close(self, index: int, reason: CloseReason) -> None:
        """An open prompt will not be trained on."""
        self._open.remove(index)
        self._closed[index] = reason

    def train(self, indices: Iterable[int]) -> None:
        """Open prompts go to the trainer."""
        self._open.difference_update(_all_in(indices, self._open))

    def take_closed(self) -> dict[int, CloseReason]:
        """What was closed since the last call."""
        closed, self._closed = self._closed, {}
        return closed

    @property
    def closed(self) -> dict[int, CloseReason]:
        """What was closed since the last :meth:`take_closed`."""
        return dict(self._closed)


def _all_in(indices: Iterable[int], known: set[int]) -> set[int]:
    wanted = set(indices)
    assert wanted <= known, f"prompts {sorted(wanted - known)} are not open"
    return wanted
