# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Units of other work run in idle times of a pipeline rank, delay nothing, and may fail."""

import json
import logging
import random
import time
from pathlib import Path

import pytest
import torch

from torchtitan.grpo.pipeline import fill_jobs
from torchtitan.grpo.pipeline.fill import DeviceMemory, FillJob, GapFiller
from torchtitan.grpo.pipeline.fill_jobs import FillContext, UserJob, load_job
from torchtitan.grpo.pipeline.schedules import SCHEDULES
from torchtitan.grpo.pipeline.tables.actions import Costs
from torchtitan.grpo.pipeline.tables.gaps import idle_before
from torchtitan.grpo.pipeline.tables.simulate import simulate

CPU = torch.device("cpu")
TIMES = (0.03, 0.06, 0.024)


class Clock:
    """A device's time. The host of a GPU runs ahead: it reaches no mark before the pass has ended."""

    def __init__(self, *, is_ahead: bool) -> None:
        self.now, self.is_ahead = 0.0, is_ahead

    def mark(self):
        return self.now

    def is_past(self, mark):
        return not self.is_ahead

    def seconds(self, begin, end):
        return end - begin


class TimedJob(FillJob):
    """Units of random times on a clock, in seconds."""

    def __init__(self, clock, shortest, longest, limit=10**9):
        super().__init__("timed")
        self.clock, self.limit = clock, limit
        self.times, self.range = random.Random(0), (shortest, longest)
        self.num_run = 0

    def run(self):
        if self.num_run == self.limit:
            return False
        self.num_run += 1
        self.clock.now += self.times.uniform(*self.range)
        return True


def table_of(name, num_ranks):
    row = SCHEDULES[name]
    costs = Costs.uniform(num_ranks, row.stages_per_rank, TIMES)
    table = row.make_table(num_ranks, 2 * num_ranks, costs)
    return costs, table, simulate(table, costs)


def rank_of(name, num_ranks, rank, jobs, clock):
    """Returns a function that runs a pass of a rank, its idle time and its makespan.

    The function returns by how much the pass was late, and what was filled. All passes take
    ``stretch`` of the times that the filler knows.
    """
    costs, table, found = table_of(name, num_ranks)
    filler = GapFiller(jobs, CPU, clock)

    def run_pass(stretch=1.0):
        filler.begin(table, found, rank)
        begin, late = clock.now, 0.0
        for action in table.actions[rank]:
            filler.fill()
            due = begin + late + stretch * found.starts[action]
            with filler.waiting():
                late += max(0.0, clock.now - due)
                clock.now = max(clock.now, due)
            clock.now += stretch * costs.time(action)
        filler.finish()
        if filler.measures:
            filler.learn(costs)
        was_ahead, clock.is_ahead = clock.is_ahead, False
        figures = filler.take_figures()
        clock.is_ahead = was_ahead
        return late, figures

    return run_pass, sum(idle_before(table, found, rank)), found.makespan


@pytest.mark.parametrize("is_ahead", [False, True], ids=["host waits", "host runs ahead"])
@pytest.mark.parametrize("rank", range(4))
def test_units_fill_most_of_the_idle_time_and_hardly_delay_a_pass(rank, is_ahead):
    clock = Clock(is_ahead=is_ahead)
    job = TimedJob(clock, 0.001, 0.02)
    run_pass, idle, makespan = rank_of("1F1B", 4, rank, [job], clock)
    passes = [run_pass() for _ in range(100)]
    for late, figures in passes[:2]:
        assert figures.units == figures.usable_seconds == 0 and late < 1e-9, "nothing is known yet"
        assert figures.late_seconds > 0, "a unit has run before the pass"
    filled = [(late, figures) for late, figures in passes if figures.usable_seconds]
    assert len(filled) == 100 - 7, "the first pass is not filled, nor are those that are timed"
    assert all(figures.usable_seconds == pytest.approx(idle) for _, figures in filled)
    assert sum(f.seconds for _, f in filled) > 0.6 * sum(f.usable_seconds for _, f in filled)
    assert sum(f.units for _, f in filled) == job.num_run - 2 - 4 - 5, "those before passes"
    assert sum(late for late, _ in filled) < 0.003 * len(filled) * makespan


@pytest.mark.parametrize("is_ahead", [False, True], ids=["host waits", "host runs ahead"])
def test_idle_times_that_prove_shorter_are_filled_less_and_the_delay_is_reported(is_ahead):
    clock = Clock(is_ahead=is_ahead)
    run_pass, idle, _ = rank_of("1F1B", 4, 0, [TimedJob(clock, 0.001, 0.02)], clock)
    for _ in range(30):
        run_pass()
    found = [run_pass(stretch=0.6) for _ in range(7)]
    first_late, first = found[0]
    assert first_late > 0.05 and 0.1 * first_late < first.late_seconds < 2 * first_late
    for late, figures in found[-3:]:
        assert late < 0.01
        assert 0.3 * 0.6 * idle < figures.seconds < 0.6 * idle


def test_a_unit_that_takes_longer_than_any_idle_time_runs_only_to_be_measured():
    clock = Clock(is_ahead=False)
    long, short = TimedJob(clock, 0.3, 0.3), TimedJob(clock, 0.005, 0.005, limit=9)
    run_pass, _, _ = rank_of("1F1B", 4, 0, [long, short], clock)
    lates = [run_pass()[0] for _ in range(9)]
    assert long.num_run == 2 + 4 + 2, "before the passes 1, 2, 4 and 8"
    assert short.num_run == 9, "until its work is done"
    assert max(lates) < 1e-9


def test_the_first_units_of_a_job_that_had_no_work_before_are_not_measured():
    clock = Clock(is_ahead=False)
    job = TimedJob(clock, 0.5, 0.5, limit=0)
    filler = GapFiller([job], CPU, clock)
    table, found = table_of("1F1B", 4)[1:]
    for step, limit in enumerate((0, 0, 2, 4), start=1):
        job.limit += limit
        filler.begin_step(step)
        filler.begin(table, found, 0)
        assert job.num_run == job.limit
        assert (job.usual is None) == (limit < 4)


def test_a_unit_that_would_not_fit_into_memory_does_not_run(monkeypatch):
    """The functions of torch.cuda stand for a GPU with 1000 bytes, 600 of which are allocated."""
    held, peak = 600, 600

    def unit(needed):
        nonlocal peak
        peak = max(peak, held + needed)

    def reset(_):
        nonlocal peak
        peak = held

    stats = {"allocated_bytes.all.current": held}
    for name, answer in {
        "mem_get_info": lambda _: (300, 1000),
        "memory_reserved": lambda _: 700,
        "memory_allocated": lambda _: held,
        "memory_stats": lambda _: stats | {"allocated_bytes.all.peak": peak},
        "max_memory_allocated": lambda _: peak,
        "reset_peak_memory_stats": reset,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    memory, job = DeviceMemory(torch.device("cuda")), TimedJob(None, 0, 0)
    memory.begin_pass()
    unit(390)  # the passes' peak
    with memory.measured(job):
        unit(200)
    assert job.num_bytes == 0 and memory.fits(job), "not known, but at most what passes need"
    with memory.measured(job, is_alone=True):
        unit(200)
    assert job.num_bytes == 200 and memory.fits(job)
    with memory.measured(job):
        unit(380)
    assert job.num_bytes == 380 and not memory.fits(job), "a twentieth stays free"


@pytest.fixture
def make_job():
    jobs = []

    def make(function):
        jobs.append(UserJob("mine.py:job", function, FillContext(CPU, 1, 4, 1, 2, Path())))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def test_a_job_is_asked_again_in_the_next_step_and_is_told_the_step(make_job):
    def units(context):
        for _ in range(context.step):
            done.append(context.step)
            yield

    done = []
    job = make_job(units)
    assert not job.run() and not job.is_lost
    for step in (1, 2):
        job.begin_step(step)
        assert [job.run() for _ in range(step + 1)] == [True] * step + [False]
    assert done == [1, 2, 2]


def test_contexts_and_random_numbers_of_a_job_do_not_reach_the_training(make_job):
    def units(context):
        with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
            while True:
                seen.append(torch.is_grad_enabled())
                drawn.append(torch.rand(1, device="cpu").item())
                yield

    seen, drawn = [], []
    job = make_job(units)
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    found = []
    for _ in range(3):
        assert job.run()
        found.append(torch.rand(1).item())
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert found == expected
    assert seen == [False] * 3
    assert len(set(drawn)) == 3, "the job's own numbers go on"


def fails(context):
    yield
    raise KeyError("no such document")


def leaves(context):
    raise SystemExit(3)


def hangs(context):
    yield
    time.sleep(2)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (fails, "failed with KeyError: 'no such document' (at "),
        (leaves, "failed with SystemExit: 3"),
        (hangs, "did not end a unit within 0.2 s"),
        (lambda context: None, "failed with TypeError: 'NoneType' object is not iterable"),
    ],
    ids=["fails", "leaves", "hangs", "no iterator"],
)
def test_a_job_that_fails_is_left_out_with_a_warning(
    function, reason, make_job, monkeypatch, caplog
):
    monkeypatch.setattr(fill_jobs, "_LONGEST_UNIT_SECONDS", 0.2)
    job = make_job(function)
    clock = Clock(is_ahead=False)
    other = TimedJob(clock, 0.01, 0.01)
    run_pass, _, _ = rank_of("1F1B", 4, 0, [job, other], clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            run_pass()
    assert job.is_lost and other.num_run > 10
    (record,) = caplog.records
    assert "parallelism.pipeline_fill_jobs: 'mine.py:job' " + reason in record.getMessage()
    assert "on rank 1 in step 0" in record.getMessage()


def test_the_example_scores_each_rank_s_texts_once(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(repository)
    job = load_job("examples/fill_held_out.py:score")
    scores = []
    for rank in (0, 1):
        job.__globals__["finished"].clear()
        context = FillContext(CPU, rank, 2, rank, 2, tmp_path, step=3)
        assert len(list(job(context))) == 101, "loading, and 100 texts"
        assert list(job(context)) == []
        scores += (tmp_path / f"scores-{rank}.jsonl").read_text().splitlines()
    assert len({json.loads(line)["text"] for line in scores}) == 200
    assert all(0 < json.loads(line)["loss"] < 5 for line in scores)
