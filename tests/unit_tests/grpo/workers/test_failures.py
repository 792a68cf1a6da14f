# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import logging

import pytest

from torchtitan.grpo.workers.failures import CallFailed, FailureCount


class Broken(RuntimeError):
    """Ends the run."""


def test_only_failures_in_a_row_end_the_run():
    failures = FailureCount(3, "toy.limit", "calls in a row failed", Broken)
    for _ in range(2):
        failures.record(CallFailed("timeout", "too slow"))
    failures.record_success()
    for _ in range(2):
        failures.record(CallFailed("timeout", "too slow"))
    with pytest.raises(Broken) as caught:
        failures.record(CallFailed("crash", "it ended"))
    assert str(caught.value) == (
        "3 calls in a row failed (toy.limit = 3). The last reason: it ended"
    )
    assert dict(failures.by_kind) == {"timeout": 4, "crash": 1}


def test_each_kind_of_failure_is_logged_once(caplog):
    failures = FailureCount(9, "toy.limit", "calls in a row failed", Broken)
    with caplog.at_level(logging.WARNING):
        for kind, message in (("a", "first"), ("a", "second"), ("b", "third")):
            failures.record(CallFailed(kind, message))
    logged = [record.getMessage() for record in caplog.records]
    assert [message.split(" (")[0] for message in logged] == ["first", "third"]
