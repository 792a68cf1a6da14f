# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.rollout.ledger import CloseReason, Ledger
from torchtitan.grpo.types import PromptProgress

REASONS: tuple[CloseReason, ...] = ("failed", "unscored", "expired", "overdue", "filtered")


def test_prompts_that_were_passed_over_are_closed_as_too_long():
    ledger = Ledger(PromptProgress())
    ledger.issue(0)
    ledger.issue(3)
    assert ledger.progress == PromptProgress(4, (0, 3))
    assert ledger.take_closed() == {1: "too long", 2: "too long"}
    ledger.issue(6, {4: "unusable"})
    assert ledger.take_closed() == {4: "unusable", 5: "too long"}


def test_what_was_open_is_issued_again_and_counts_once():
    ledger = Ledger(PromptProgress(5, (1, 4)), {2: "failed"})
    ledger.issue(1)
    ledger.issue(4)
    ledger.issue(5)
    assert ledger.progress == PromptProgress(6, (1, 4, 5))
    ledger.close(4, "filtered")
    ledger.train([1])
    assert ledger.progress == PromptProgress(6, (5,))
    assert ledger.take_closed() == {2: "failed", 4: "filtered"}


@given(data=st.data())
def test_issued_is_trained_or_closed_or_open_across_any_number_of_resumes(data: st.DataObject):
    trained: list[int] = []
    closed: dict[int, CloseReason] = {}
    checkpoint = PromptProgress(), 0, {}
    ledger, pending, position = Ledger(PromptProgress()), [], 0
    since: dict[int, CloseReason] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["issue", "issue", "close", "batch", "save", "kill"]))
        open_now = [i for i in ledger.progress.open if i not in pending]
        if action == "issue":
            if pending:
                ledger.issue(pending.pop(0))
            else:
                position += data.draw(st.integers(0, 1))
                ledger.issue(position)
                position += 1
        elif action == "close" and open_now:
            ledger.close(data.draw(st.sampled_from(open_now)), data.draw(st.sampled_from(REASONS)))
        elif action == "batch" and open_now:
            batch = data.draw(st.lists(st.sampled_from(open_now), min_size=1, unique=True))
            ledger.train(batch)
            trained += batch
            since = ledger.take_closed()
            assert not since.keys() & closed.keys()
            closed |= since
        elif action == "save":
            # Of the state with the last batch, as a checkpoint has it without saved rollouts.
            progress = PromptProgress(
                ledger.progress.position,
                tuple(sorted({*ledger.progress.open, *ledger.closed})),
            )
            checkpoint = progress, len(trained), dict(closed)
        elif action == "kill":
            progress, num_trained, closed = checkpoint[0], checkpoint[1], dict(checkpoint[2])
            del trained[num_trained:]
            ledger, pending, position = Ledger(progress), list(progress.open), progress.position
        progress = ledger.progress
        everything = [*trained, *closed, *ledger.closed, *progress.open]
        assert sorted(everything) == list(range(progress.position))
