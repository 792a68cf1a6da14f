# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the trainer waits for: each cause, in a world in which it holds."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from producer_world import GROUP_SIZE
from stub_clients import StubClient

from torchtitan.grpo.config import GRPO, Rollout
from torchtitan.grpo.rollout import waits as waits_module
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.serving.server_state import Server
from torchtitan.grpo.rollout.waits import RolloutWaits
from torchtitan.grpo.system.cause_clock import CauseClock

GROUPS_PER_BATCH = 4


class Client(StubClient):
    def __init__(self, url: str) -> None:
        self.url = url


class Scene:
    """Groups of a batch on servers, as the producer would tell of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr(waits_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        rollout = Rollout(
            **{"max_head_offpolicyness": 8, "max_concurrent_rollouts": 64, **settings}
        )
        grpo = GRPO(group_size=GROUP_SIZE, prompts_per_step=GROUPS_PER_BATCH)
        self.admission = Admission(grpo, rollout)
        self.servers = [Server(Client(f"http://{i}")) for i in range(2)]
        for server in self.servers:
            server.attest(0)
        self.judge = SimpleNamespace(is_scoring=True)
        self.dispatcher = SimpleNamespace(
            servers={server.url: server for server in self.servers}, in_flight=0, num_held=0
        )
        self.groups: list[Any] = []
        self._ids = itertools.count()
        self.waits = RolloutWaits(
            self.admission, self.dispatcher, self.judge, now=lambda: self.now  # pyright: ignore
        )  # fmt: skip

    def start(self, count: int, *servers: int, left: int = GROUP_SIZE) -> None:
        """Starts groups, each on the next of ``servers``, of which ``left`` completions are not done."""
        for number in range(count):
            group_id, server = next(self._ids), self.servers[servers[number % len(servers)]]
            assert server.version is not None
            self.admission.start(group_id, server.version)
            for _ in range(left):
                server.begin_job(10.0, group_id)
            ends = [
                SimpleNamespace(task=SimpleNamespace(done=lambda i=i: i >= left))
                for i in range(GROUP_SIZE)
            ]
            prompt = SimpleNamespace(group_id=group_id)
            self.groups.append(SimpleNamespace(prompt=prompt, task=object(), trajectories=ends))
            self.dispatcher.in_flight += left

    def finish(self) -> None:
        """All groups end, and get their scores."""
        for group in self.groups:
            self.admission.finish(group.prompt.group_id, 0)
        for server in self.servers:
            for job in list(server.jobs):
                server.end_job(job)
        self.groups.clear()
        self.dispatcher.in_flight = 0

    def wait(self, seconds: float = 1.0, awaited: Sequence[Any] | None = None) -> None:
        awaited = self.groups[: self.admission.num_missing] if awaited is None else awaited
        self.waits.note(None)  # or it would not look again so soon
        self.waits.note(awaited)
        self.now += seconds
        self.waits.note(awaited)

    def train(self, seconds: float) -> None:
        self.waits.note(None)
        self.now += seconds
        self.waits.note(None)

    def causes(self, *, mostly_judge: bool = False) -> dict[str, float]:
        taken = self.waits.take(mostly_judge=mostly_judge)
        name = {k.removeprefix("wait/").removesuffix("_seconds"): v for k, v in taken.items()}
        return {cause: pytest.approx(v) for cause, v in name.items() if "/" not in cause}


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_generation(scene: Scene):
    scene.start(GROUPS_PER_BATCH, 0, 1)
    scene.wait()
    assert scene.causes() == {"generation": 1.0}
    assert scene.causes() == {}


@pytest.mark.parametrize(("mostly_judge", "cause"), [(False, "rewards"), (True, "judge")])
def test_rewards_of_all_groups_that_the_batch_lacks(scene: Scene, mostly_judge: bool, cause: str):
    scene.start(GROUPS_PER_BATCH, 0, 1)
    for group in scene.groups:
        group.task = None
    scene.wait()
    assert scene.causes(mostly_judge=mostly_judge) == {cause: 1.0}
    scene.groups[0].task = object()  # one is still being written
    scene.wait()
    assert scene.causes(mostly_judge=mostly_judge) == {"generation": 1.0}


def test_a_teacher(scene: Scene):
    scene.start(GROUPS_PER_BATCH, 0)
    for group in scene.groups:
        group.task = None
    scene.judge.is_scoring = False
    scene.wait()
    assert scene.causes() == {"teacher": 1.0}


def test_no_server(scene: Scene):
    scene.start(GROUPS_PER_BATCH, 0, 1)
    scene.servers[0].leave()
    scene.wait()
    assert scene.causes() == {"generation": 1.0}
    scene.servers[1].leave()
    scene.wait()
    assert scene.causes() == {"no_server": 1.0}


def test_episodes_that_hold_what_the_batch_lacks(scene: Scene):
    scene.start(GROUPS_PER_BATCH, 0, 1)
    scene.dispatcher.num_held = 1
    scene.wait()
    assert scene.causes() == {"generation": 1.0}
    for server in scene.servers:
        for job in list(server.jobs):
            server.end_job(job)
        server.begin_job(10.0, is_held=True)
    server.begin_job(10.0, 77)  # of a later batch
    scene.wait()
    assert scene.causes() == {"episodes": 1.0}


BOUNDS = [
    ({"max_head_offpolicyness": 0}, "bound"),
    ({"buffer_size_limit": GROUPS_PER_BATCH * GROUP_SIZE}, "buffer"),
]


@pytest.mark.parametrize(("settings", "cause"), BOUNDS)
@pytest.mark.parametrize("left", [GROUP_SIZE, 1])
def test_what_could_have_begun_while_the_trainer_was_busy_waits_for_the_bound(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], cause: str, left: int
):
    """This holds for the last completions, of which there are three of twelve, as for all."""
    scene = Scene(monkeypatch, **settings)
    scene.start(GROUPS_PER_BATCH, 0, 1)
    scene.finish()
    scene.train(3.0)
    assert scene.admission.take_batch() is not None
    for server in scene.servers:
        server.attest(1)
    scene.start(GROUPS_PER_BATCH - 1, 0, 1, left=left)
    scene.start(1, 0, left=left - 1)
    scene.wait(2.0)
    assert scene.causes() == {cause: 2.0}
    scene.wait(2.0)  # for a later batch
    rest = "generation" if left == GROUP_SIZE else "tail"
    # With the bound of 0, nothing that could have begun so early may be trained so late.
    assert scene.causes() == ({rest: 2.0} if cause == "bound" else {cause: 1.0, rest: 1.0})


@pytest.mark.parametrize(("settings", "cause"), BOUNDS)
def test_a_wait_beyond_the_time_that_was_held_is_for_generation(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], cause: str
):
    scene = Scene(monkeypatch, **settings)
    scene.start(GROUPS_PER_BATCH, 0, 1)
    scene.finish()
    scene.train(0.5)
    scene.admission.take_batch()
    for server in scene.servers:
        server.attest(1)
    scene.start(GROUPS_PER_BATCH, 0, 1)
    scene.wait(2.0)
    assert scene.causes() == {cause: 0.5, "generation": 1.5}


def test_a_server_that_lacks_new_weights_keeps_no_group_from_starting_on_another(
    monkeypatch: pytest.MonkeyPatch,
):
    scene = Scene(monkeypatch, max_head_offpolicyness=0)
    scene.start(GROUPS_PER_BATCH, 0, 1)
    scene.finish()
    scene.admission.take_batch()
    scene.servers[0].attest(1)
    scene.train(3.0)
    scene.start(GROUPS_PER_BATCH, 0)
    scene.wait()
    metrics = scene.waits.take(mostly_judge=False)
    assert metrics["rollout/wait_trainer_fraction"] == 0.75  # one server has room
    assert metrics["wait/generation_seconds"] == 1.0


def test_a_push_that_the_next_groups_need(monkeypatch: pytest.MonkeyPatch):
    """The trainer asks, and no server has weights that are new enough to start anything."""
    scene = Scene(monkeypatch, max_head_offpolicyness=0)
    scene.start(GROUPS_PER_BATCH, 0, 1)
    scene.finish()
    scene.admission.take_batch()
    scene.wait(awaited=[])
    assert scene.causes() == {"bound": 1.0}


def test_servers_that_stand_still(scene: Scene):
    scene.start(GROUPS_PER_BATCH, 0, 1)
    scene.servers[0].is_silent = True
    scene.wait()
    assert scene.causes() == {"generation": 1.0}
    for job in list(scene.servers[1].jobs):
        scene.servers[1].end_job(job)
    scene.wait()
    assert scene.causes() == {"stalled_server": 1.0}


@pytest.mark.parametrize(
    ("speed", "cause"), [(40.0, "slow_server"), (60.0, "generation"), (0.0, "generation")]
)
def test_a_server_of_less_than_half_of_the_others_speed_is_slow(
    scene: Scene, speed: float, cause: str
):
    scene.start(GROUPS_PER_BATCH, 0)
    scene.servers[0].tokens_per_second, scene.servers[1].tokens_per_second = speed, 100.0
    scene.wait()
    assert scene.causes() == {cause: 1.0}


def test_the_last_quarter_of_the_completions_is_the_tail(scene: Scene):
    scene.start(GROUPS_PER_BATCH, 0, 1)
    done = scene.groups[1:]
    for group in done:
        scene.admission.finish(group.prompt.group_id, 0)
    scene.wait()  # one group of four
    assert scene.causes() == {"tail": 1.0}
    # The batch also lacks a group that has not begun.
    scene.wait(awaited=[])
    assert scene.causes() == {"generation": 1.0}


def test_a_limit_of_completions_that_leaves_a_server_idle(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch, max_concurrent_rollouts=2 * GROUP_SIZE)
    scene.start(2, 0)
    scene.wait()
    assert scene.causes() == {"concurrency": 1.0}
    scene.servers[1].begin_job(10.0, 0)
    scene.wait()
    assert scene.causes() == {"generation": 1.0}


def test_a_server_s_time_is_divided_and_its_shares_add_up_to_1():
    now = [0.0]
    server = Server(Client("http://0"), clock=CauseClock("starting", lambda: now[0]))

    def spend(seconds: float) -> None:
        now[0] += seconds

    spend(1.0)
    server.attest(0)
    spend(1.0)
    held = server.begin_job(1.0, is_held=True)  # an environment is at work
    spend(1.0)
    job = server.begin_job(1.0)
    spend(4.0)
    server.attest(1, pause_seconds=1.0)
    spend(1.0)
    server.end_job(job)
    server.end_job(held)
    server.leave()
    spend(1.0)
    server.is_asleep = True
    server.note_activity()
    spend(1.0)
    shares = server.take_shares()
    assert shares == {
        "starting_fraction": 0.1, "idle_fraction": 0.2, "generating_fraction": 0.4,
        "paused_fraction": 0.1, "lost_fraction": 0.1, "asleep_fraction": 0.1,
    }  # fmt: skip
    assert sum(shares.values()) == pytest.approx(1.0)
    spend(1.0)
    assert server.take_shares() == {"asleep_fraction": 1.0}
    assert server.take_shares() == {}, "no time has passed"


def test_a_longer_pause_than_generation_was_idle_before():
    now = [0.0]
    server = Server(Client("http://0"), clock=CauseClock("starting", lambda: now[0]))
    server.attest(0)
    now[0] += 3.0
    job = server.begin_job(1.0)
    now[0] += 1.0
    server.attest(1, pause_seconds=2.0)
    server.end_job(job)
    assert server.take_shares() == {"idle_fraction": 0.5, "paused_fraction": 0.5}
    # What began before the last batch is not known any more.
    server.attest(2, pause_seconds=9.0)
    now[0] += 1.0
    assert server.take_shares() == {"idle_fraction": 1.0}
