"""What a run shows and leaves behind."""

import json

import pytest

from torchtitan.grpo.observe.profiling import StepClock
from torchtitan.grpo.observe.report import mean_over, write_summary
from torchtitan.grpo.observe.run_log import RunLog


def test_the_clock_gives_each_step_its_own_parts():
    clock = StepClock()
    for _ in range(2):
        with clock.measure("wait_data"):
            pass
    first = clock.end_step()
    always = {"time/step_seconds", "time/elapsed_seconds", "time/wait_data_fraction"}
    assert set(first) == always | {"time/wait_data_seconds"}
    assert 0 <= first["time/wait_data_seconds"] <= first["time/step_seconds"]
    share = first["time/wait_data_seconds"] / first["time/step_seconds"]
    assert first["time/wait_data_fraction"] == pytest.approx(share)
    second = clock.end_step()
    assert set(second) == always
    assert second["time/wait_data_fraction"] == 0
    assert second["time/elapsed_seconds"] > first["time/elapsed_seconds"]


def test_the_summary_is_written_and_means_skip_records_without_the_key(tmp_path):
    history = [{"step": step, "reward/mean": step / 10} for step in range(1, 13)]
    assert mean_over(history[-10:], "reward/mean") == pytest.approx(0.75)
    assert mean_over(history, "no/such") is None
    assert json.loads(write_summary(tmp_path, {"steps": 12}).read_text()) == {"steps": 12}


def test_a_resumed_run_continues_its_records_where_the_checkpoint_was(tmp_path):
    file = tmp_path / "metrics.jsonl"
    log = RunLog(file, 0)
    for step in (1, 2, 3):
        log.add({"step": step})
    log.close()
    with file.open("a") as half:
        half.write('{"step": 4, "rew')
    resumed = RunLog(file, 2)
    resumed.add({"step": 3, "again": True})
    resumed.close()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert records == resumed.read() == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    RunLog(file, 0).close()
    assert file.read_text() == ""
