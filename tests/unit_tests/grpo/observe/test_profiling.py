# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The profilers of a run: which steps are traced, and which settings are refused."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.trainer import check_profiling
from torchtitan.grpo.observe.profiling import StepClock, profilers
from torchtitan.grpo.run_folder.replacing import move_aside


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(tmp_path / "run")
    config.profiling.enable_profiling = True
    return config


@pytest.fixture
def rank():
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield 1
    dist.destroy_process_group()


def run(config: JobConfig, first: int, stop: int) -> dict[str, set[int]]:
    """Takes the steps from ``first + 1`` to ``stop``; returns the steps in each trace."""
    with profilers(config, first) as running:
        for step in range(first + 1, stop + 1):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(3).sum()
            for profiler in running:
                profiler.step()
    folder = Path(config.job.dump_folder)
    return {
        str(file.relative_to(folder)): set(map(int, re.findall(r'"step (\d+)"', file.read_text())))
        for file in folder.rglob("*.json")
    }


DEFAULT = (10, 3, 1)  # profile_freq, profiler_warmup, profiler_active


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize(
    ("settings", "first", "steps", "stop", "traced"),
    [
        (DEFAULT, 0, 21, 21, {10: {10}, 20: {20}}),
        (DEFAULT, 0, 3, 3, {3: {3}}),  # a run that is too short for one period
        (DEFAULT, 9, 12, 12, {10: {10}}),  # resumed
        (DEFAULT, 12, 17, 17, {17: {17}}),
        (DEFAULT, 0, 20, 7, {}),  # stopped before the first trace
        ((1, 0, 1), 0, 2, 2, {1: {1}, 2: {2}}),
        ((3, 1, 2), 0, 7, 7, {3: {2, 3}, 6: {5, 6}}),
        ((5, 1, 3), 0, 20, 4, {4: {3, 4}}),  # stopped while it records
    ],
)
def test_a_run_without_gpu_is_traced(rank, config, settings, first, steps, stop, traced):
    profiling = config.profiling
    profiling.profile_freq, profiling.profiler_warmup, profiling.profiler_active = settings
    config.training.steps = steps
    check_profiling(config)
    found = run(config, first, stop)
    assert found == {
        f"profile_traces/iteration_{step}/rank{rank}_trace.json": inside
        for step, inside in traced.items()
    }
    if found:
        aside = move_aside(config, keep=True)
        assert list(Path(config.job.dump_folder).iterdir()) == [aside]


def test_a_trace_that_cannot_be_written_ends_no_run(rank, config):
    config.training.steps = 2
    Path(config.job.dump_folder).mkdir()
    Path(config.job.dump_folder, "profile_traces").write_text("a file stands in the folder's place")
    assert run(config, 0, 2) == {}


def test_the_clock_gives_each_step_its_own_parts():
    clock = StepClock()
    for _ in range(2):
        with clock.measure("wait_data"):
            pass
    first, second = clock.end_step(), clock.end_step()
    assert set(first) - set(second) == {"time/wait_data_seconds"}
    share = first["time/wait_data_seconds"] / first["time/step_seconds"]
    assert first["time/wait_data_fraction"] == pytest.approx(share) and 0 <= share <= 1
    assert second["time/wait_data_fraction"] == 0
    assert second["time/elapsed_seconds"] > first["time/elapsed_seconds"]
