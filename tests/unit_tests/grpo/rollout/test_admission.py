# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""No consumed group is older than the staleness bound, and nothing deadlocks."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.config import GRPO, Rollout
from torchtitan.grpo.rollout.admission import Admission


def make(
    groups_per_batch: int,
    max_staleness: int,
    start_version: int = 0,
    *,
    max_concurrent: int = 1_000_000,
    max_buffered: int = 1_000_000,
) -> Admission:
    grpo = GRPO(prompts_per_step=groups_per_batch, group_size=4)
    rollout = Rollout(
        max_head_offpolicyness=max_staleness,
        max_concurrent_rollouts=max_concurrent,
        buffer_size_limit=4 * max_buffered,
    )
    return Admission(grpo, rollout, start_version)


def test_synchronous_training_starts_one_batch_of_groups_for_each_version():
    admission = make(groups_per_batch=2, max_staleness=0)
    for group_id in range(2):
        assert admission.may_start(0, 0)
        admission.start(group_id, 0)
    assert not admission.may_start(0, 0)
    assert admission.finish(0, oldest_version=0)
    assert admission.take_batch() is None
    assert admission.finish(1, oldest_version=0)
    assert admission.take_batch() == [0, 1]
    assert not admission.may_start(0, 0), "version 0 is too old for batch 1"
    assert admission.may_start(1, 0)


def test_group_that_is_older_than_attested_is_closed():
    admission = make(groups_per_batch=1, max_staleness=1, start_version=5)
    admission.start(0, 5)
    assert not admission.finish(0, oldest_version=4)
    assert "0 running" in admission.describe()
    small = make(groups_per_batch=8, max_staleness=1, max_concurrent=10)
    assert small.may_start(0, 6) and not small.may_start(0, 7)


def test_resumed_run_counts_its_earlier_batches_as_consumed():
    admission = make(groups_per_batch=2, max_staleness=1, start_version=7)
    assert not admission.may_start(5, 0)
    assert admission.may_start(6, 0)
    admission.start(0, 6)
    admission.start(1, 6)
    assert not admission.may_start(6, 0)
    assert admission.may_start(7, 0)


@dataclass
class Simulation:
    """Servers of random speed, lag and mortality; where it ``streams``, groups are taken singly."""

    admission: Admission
    rng: random.Random
    num_servers: int
    streams: bool = False
    running: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    oldest: dict[int, int] = field(default_factory=dict)
    next_id: int = 0
    taken: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.trained_versions = self.admission.next_batch
        self.versions: list[int | None] = [self.trained_versions] * self.num_servers

    def advance(self, stalled: bool) -> None:
        """One random event; where ``stalled``, only such as must happen some day."""
        action = self.rng.choice(["start", "end", "push", "train", "die", "start", "end"])
        if action == "die" and not stalled:
            self.versions[self.rng.randrange(self.num_servers)] = None
        elif action == "push":
            self.versions[self.rng.randrange(self.num_servers)] = self.trained_versions
        elif action == "start":
            self.start()
        elif action == "end" and self.running:
            self.end(self.rng.choice(list(self.running)), stalled)
        elif action == "train":
            self.train_one() if self.streams else self.train()

    def start(self) -> None:
        server = self.rng.randrange(self.num_servers)
        version = self.versions[server]
        if version is not None and self.admission.may_start(version, 0):
            self.admission.start(self.next_id, version)
            self.running[self.next_id] = (server, version, self.trained_versions)
            self.next_id += 1

    def end(self, group_id: int, stalled: bool) -> None:
        server, version, _ = self.running.pop(group_id)
        if not stalled and (self.versions[server] is None or self.rng.random() < 0.1):
            self.admission.close(group_id)
            return
        # The server may have been updated before it wrote the first token, or restarted.
        oldest = self.rng.choice([version, max(version, self.versions[server] or 0)])
        if not stalled and self.rng.random() < 0.1:
            oldest = version - 1
        if self.admission.finish(group_id, oldest):
            self.oldest[group_id] = oldest

    def train(self) -> None:
        if (batch := self.admission.take_batch()) is not None:
            assert len(batch) == len(set(batch)) == self.admission.groups_per_batch
            for group_id in batch:
                self.check_age(group_id)
            self.trained_versions += 1

    def train_one(self) -> None:
        group_id = self.admission.take_next()
        if group_id is None:
            return
        self.check_age(group_id)
        assert group_id not in self.taken
        self.taken.add(group_id)
        if self.admission.next_batch > self.trained_versions:
            assert len(self.taken) == self.admission.groups_per_batch
            self.taken = set()
            self.trained_versions += 1

    def check_age(self, group_id: int) -> None:
        age = self.trained_versions - self.oldest.pop(group_id)
        assert 0 <= age <= self.admission.max_staleness, (
            f"age {age} in batch {self.trained_versions}"
        )


def check_invariant(admission: Admission) -> None:
    deadlines = sorted(group.deadline for group in admission._open.values())
    for count, deadline in enumerate(deadlines, start=1):
        places = (deadline - admission.next_batch + 1) * admission.groups_per_batch
        assert count <= places - admission._num_taken


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups_per_batch=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    num_servers=st.integers(1, 4),
    start_version=st.integers(0, 3),
    streams=st.booleans(),
)
def test_no_consumed_group_is_older_than_the_bound_and_no_run_deadlocks(
    seed, groups_per_batch, max_staleness, num_servers, start_version, streams
):
    admission = make(groups_per_batch, max_staleness, start_version)
    simulation = Simulation(admission, random.Random(seed), num_servers, streams)
    for _ in range(400):
        simulation.advance(stalled=False)
        check_invariant(simulation.admission)
    # From now on servers come back and all work ends: training must go on.
    goal = simulation.trained_versions + 3
    for _ in range(20_000):
        if simulation.trained_versions >= goal:
            return
        simulation.advance(stalled=True)
        check_invariant(simulation.admission)
    raise AssertionError(f"deadlock: {simulation.admission.describe()}")


def test_starts_wait_while_too_many_finished_groups_do():
    admission = make(groups_per_batch=1, max_staleness=5)
    bounded = make(groups_per_batch=1, max_staleness=5, max_buffered=2)
    for ledger in (admission, bounded):
        for group_id in range(2):
            ledger.start(group_id, 0)
            ledger.finish(group_id, 0)
    assert admission.may_start(0, 0)
    assert not bounded.may_start(0, 0)
    assert bounded.take_batch() == [0]
    assert bounded.may_start(0, 0)


def test_what_another_server_could_generate_is_split_by_the_batch_that_waits_for_it():
    admission = make(groups_per_batch=4, max_staleness=1, max_concurrent=4 * 7)
    for group_id in range(4):
        admission.start(group_id, 0)
    admission.finish(0, oldest_version=0)
    # Batch 0 lacks 3 groups, of which 1 and 2 run elsewhere but are not due, so new ones may fill it.
    assert admission.num_missing == 3
    assert admission.lendable({3}, 0, completions_in_flight=12) == (3, 2)
    assert admission.lendable({3}, 0, completions_in_flight=24) == (2, 0)
    assert admission.lendable({3}, 0, completions_in_flight=32) == (1, 0)
    for group_id in (1, 2, 3):
        admission.finish(group_id, oldest_version=0)
    assert admission.take_batch() == [0, 1, 2, 3]
    for group_id in range(4, 8):
        admission.start(group_id, 0)
    # They are due in batch 1, which waits for those that run elsewhere, whatever else is generated.
    assert admission.lendable({4}, 1, completions_in_flight=0) == (1, 4)
    assert admission.lendable(set(), 1, completions_in_flight=0) == (0, 4)
    admission.start(8, 1)
    assert admission.lendable({4, 5}, 0, completions_in_flight=0) == (2, 0), (
        "it is too old for more"
    )


def test_finished_groups_leave_nothing_to_generate():
    admission = make(groups_per_batch=4, max_staleness=0)
    for group_id in range(2):
        admission.start(group_id, 0)
    admission.finish(0, oldest_version=0)
    assert admission.lendable(set(), 0, completions_in_flight=0) == (2, 0)
