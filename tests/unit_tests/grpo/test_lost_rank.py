# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The message about a rank that is lost, and who prints it."""

import pytest

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.lost_rank import _claims_report, describe_lost, describe_next
from torchtitan.grpo.system.rank_status import LostRank, Status

STATUS = Status(3, "node-b", 4711, "forward and backward", 7)


@pytest.fixture
def config() -> JobConfig:
    config = JobConfig()
    config.checkpoint.enable = True
    return config


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        (LostRank(STATUS), "died in step 8, phase: forward and backward"),
        (LostRank(STATUS, silent_seconds=61.0), "gave no sign of life for 61 s"),
        (LostRank(STATUS, has_reported=True), "failed, for a reason that is printed on its host"),
    ],
)
def test_it_names_rank_host_phase_and_the_last_completed_step(config, lost, how):
    text = describe_lost(lost, config)
    assert text.startswith(f"Training rank 3 on node-b (process 4711) {how}")
    assert "in step 8, phase: forward and backward; the last completed step is 7." in text


@pytest.mark.parametrize(
    ("most", "count", "enable", "text"),
    [
        (0, 0, True, "--max-restarts N lets torchrun do so"),
        (2, 1, True, "started again, from the newest checkpoint (restart 2 of 2, --max-restarts)"),
        (2, 2, True, "No restart is left (--max-restarts 2)"),
        (2, 0, False, "with step 1, because checkpoint.enable is false (restart 1 of 2"),
    ],
)
def test_it_says_what_follows(config, monkeypatch, most, count, enable, text):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(most))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
    config.checkpoint.enable = enable
    assert text in describe_next(config)


def test_one_rank_of_an_attempt_prints_it(tmp_path, monkeypatch):
    for attempt, ranks in ((0, 3), (1, 2)):
        claims = []
        for rank in range(ranks):
            folder = tmp_path / f"attempt_{attempt}/{rank}"
            folder.mkdir(parents=True)
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
            claims.append(_claims_report(LostRank(STATUS)))
        assert claims == [True] + [False] * (ranks - 1)


@pytest.mark.parametrize(("lost", "reporter"), [(3, 0), (0, 1)])
def test_without_torchrun_the_first_rank_that_lives_prints_it(monkeypatch, lost, reporter):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    status = Status(lost, "node-b", 1)
    claims = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        claims.append(_claims_report(LostRank(status)))
    assert claims.index(True) == reporter and sum(claims) == 1
