"""What a run shows and leaves behind."""

import json

import numpy as np
import pytest

from torchtitan.grpo.observe.clock import StepClock
from torchtitan.grpo.observe.progress import progress_line
from torchtitan.grpo.observe.report import SampleLog, draw_reward_curve, mean_over, write_summary
from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.types import Rollout, RolloutGroup, VersionSegment

METRICS = {
    "policy_version": 7.0,
    "weight_sync/server_version": 6.0,
    "reward/mean": 0.51234,
    "staleness/mean_steps": 0.75,
    "staleness/max_steps": 2.0,
    "time/tokens_per_second": 12345.6,
    "time/step_seconds": 0.5,
    "mismatch/kl": 1.2e-5,
}


def test_the_live_line_tells_reward_staleness_throughput_and_sync_state():
    line = progress_line(METRICS)
    for part in ("reward 0.512", "stale 0.8/2", "12,346 tok/s", "kl 1.2e-05", "sync v6 -> v7"):
        assert part in line
    assert "v7 synced" in progress_line(METRICS | {"weight_sync/server_version": 7.0})


def test_the_clock_gives_each_step_its_own_parts():
    clock = StepClock()
    for _ in range(2):
        with clock.measure("wait_data"):
            pass
    first = clock.end_step()
    assert set(first) == {"time/wait_data_seconds", "time/step_seconds"}
    assert 0 <= first["time/wait_data_seconds"] <= first["time/step_seconds"]
    assert set(clock.end_step()) == {"time/step_seconds"}


def test_the_samples_file_holds_readable_rollouts_of_different_prompts(tmp_path):
    def group(index):
        rollout = Rollout(
            prompt_ids=np.array([1], np.int32), completion_ids=np.array([2, 3], np.int32),
            generator_logprobs=np.zeros(2, np.float32),
            segments=(VersionSegment(4, 0, 1), VersionSegment(5, 1, 2)), finish_reason="stop",
            completion=f"größer {index}", reward=0.5, reward_components={"exact_match": 0.5},
        )  # fmt: skip
        return RolloutGroup(index, f"prompt {index}", (rollout, rollout), "http://s:1")

    log = SampleLog(tmp_path / "samples.jsonl", per_step=2, step=0)
    log.write(5, [group(i) for i in range(4)])
    log.close()
    text = (tmp_path / "samples.jsonl").read_text()
    assert "größer" in text
    records = [json.loads(line) for line in text.splitlines()]
    assert [r["prompt"] for r in records] == ["prompt 0", "prompt 1"]
    assert records[0]["versions"] == [[4, 0, 1], [5, 1, 2]]


def test_summary_and_curve_are_written(tmp_path):
    history = [METRICS | {"step": step, "reward/mean": step / 10} for step in range(1, 13)]
    assert mean_over(history[-10:], "reward/mean") == pytest.approx(0.75)
    assert mean_over(history, "no/such") is None
    assert draw_reward_curve(tmp_path, history).stat().st_size > 1000
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
    assert records == resumed.records == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    RunLog(file, 0).close()
    assert file.read_text() == ""
