# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rollout process from its start to batches, with the real embedded server."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.link import RolloutFailed, RolloutKilled

GROUP_SIZE = 4
PROMPTS_PER_STEP = 3
READY_SECONDS = 300.0
BATCH_SECONDS = 300.0


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=30)
    return alive


def test_batches_follow_versions_within_the_bound_and_evaluations_are_alike_each_time(
    config: RolloutProcessConfig, open_link, serve_version
):
    link = open_link(config)
    (server,) = link.wait_ready(READY_SECONDS)
    assert link.next_batch(0, BATCH_SECONDS, should_stop=lambda: True) is None
    serve_version(link, server.url, 0)
    link.request_evaluation(1)  # which no server serves: the next request gives it up
    results = []
    for _ in range(2):
        link.request_evaluation(0)
        results.append(link.wait_evaluation(BATCH_SECONDS))
    first, second = results
    assert first is not None and second is not None
    assert (first.num_prompts, len(first.sets[0].samples)) == (16, 8)
    assert (first.version, first.newest_version, first.mixed_fraction) == (0, 0, 0.0)
    assert first.sets == second.sets
    seen: set[int] = set()
    tokens_per_second = 0.0
    for version in range(3):
        # The batch that was asked for first was kept while something else was waited for.
        batch = link.next_batch(version, BATCH_SECONDS)
        assert batch is not None
        assert len(batch.groups) == PROMPTS_PER_STEP
        for group in batch.groups:
            assert len(group.rollouts) == GROUP_SIZE
            assert group.server_url == server.url
            assert "->" in group.prompt_text
            for rollout in group.rollouts:
                assert 0 <= version - rollout.oldest_version <= 1
                assert rollout.reward == rollout.reward_components["partial_match"]
                assert len(rollout.token_ids) == len(rollout.logprobs) <= 12
                assert (rollout.logprobs <= 0).all()
                assert rollout.logprobs.dtype == np.float32
                assert rollout.prompt_ids.dtype == rollout.token_ids.dtype == np.int32
        ids = {group.group_id for group in batch.groups}
        assert not ids & seen
        seen |= ids
        assert not ids & set(batch.progress.open)
        assert seen | set(batch.progress.open) == set(range(batch.progress.position))
        assert 0 <= batch.metrics["reward/mean"] <= 1
        tokens_per_second += batch.metrics["rollout/tokens_per_second"]
        serve_version(link, server.url, version + 1)
    assert tokens_per_second > 0


def test_batch_that_does_not_come_is_an_error_that_says_what_is_lacking(
    config: RolloutProcessConfig, open_link
):
    link = open_link(config)
    link.wait_ready(READY_SECONDS)
    # No server was attested, so there will be no batch.
    assert link.next_batch(0, BATCH_SECONDS, should_stop=lambda: True) is None
    with pytest.raises(
        RolloutFailed,
        match=r"within 10 s \(rollout.batch_timeout_seconds\): batch 0: 0 of 3 .* 0 of 1 servers ready",
    ):
        link.next_batch(0, 10.0)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 0)])
def test_a_rollout_process_that_ends_is_reported_with_its_exit_code(
    config: RolloutProcessConfig, open_link, signum, code
):
    config.rollout.max_process_restarts = 0
    link = open_link(config)
    (server,) = link.wait_ready(READY_SECONDS)
    children = psutil.Process(link._child.pid).children(recursive=True)
    os.kill(link._child.pid, signum)
    with pytest.raises(RolloutFailed, match=f"ended with exit code {code}"):
        link.next_batch(0, BATCH_SECONDS)
    with pytest.raises(RolloutFailed, match=f"ended with exit code {code}"):
        link.notify_version(server.url, 0)
    assert not still_running(children)


def test_killed_rollout_process_is_started_again_where_the_last_batch_was(
    config: RolloutProcessConfig, open_link, serve_version
):
    config.rollout.max_process_restarts = 1
    link = open_link(config)
    (server,) = link.wait_ready(READY_SECONDS)
    serve_version(link, server.url, 0)
    first = link.next_batch(0, BATCH_SECONDS)
    assert first is not None and first.progress.open
    link._child.kill()
    with pytest.raises(RolloutKilled, match="ended with exit code -9"):
        link.next_batch(1, BATCH_SECONDS)
    link.notify_version(server.url, 1)  # nobody hears it, and nobody minds
    link.restart(replace(config, start_version=1, progress=first.progress))
    (again,) = link.wait_ready(READY_SECONDS)
    (news,) = link.watch.poll() or []
    assert news == again and again.num_joined > server.num_joined
    serve_version(link, again.url, 1)
    second = link.next_batch(1, BATCH_SECONDS)
    assert second is not None
    trained = [group.group_id for batch in (first, second) for group in batch.groups]
    assert sorted([*trained, *second.progress.open]) == list(range(second.progress.position))
    link._child.kill()
    with pytest.raises(RolloutKilled):
        link.next_batch(2, BATCH_SECONDS)
    with pytest.raises(
        RolloutFailed, match=r"was already restarted 1 times \(rollout.max_process_restarts"
    ):
        link.restart(config)


def test_a_server_that_is_too_short_ends_the_start_with_the_length_that_is_needed(
    config: RolloutProcessConfig, open_link, serve
):
    config.inference.launch, config.inference.urls = False, [serve().url]
    config.seq_len = 400
    with pytest.raises(RolloutFailed, match=r"at most 256 tokens .* this run needs 400"):
        open_link(config).wait_ready(READY_SECONDS)


PARENT = """
import json, sys
import msgspec
from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.link import RolloutLink

link = RolloutLink(msgspec.json.decode(sys.argv[1], type=RolloutProcessConfig))
link.start()
(server,) = link.wait_ready(300)
print("ready", flush=True)
link.next_batch(0, 600)
"""


@pytest.fixture
def parent(config: RolloutProcessConfig, tmp_path: Path, repository: Path):
    """A process that takes the place of rank 0, once its rollout process is ready."""
    import msgspec

    (tmp_path / "parent_program.py").write_text(PARENT)
    launcher = str(repository / "torchtitan/grpo/system/light_start.py")
    process = subprocess.Popen(
        [sys.executable, launcher, "parent_program", msgspec.json.encode(config).decode()],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert "ready\n" in lines, "the parent has ended"  # a slow start is told before
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_killed_parent_leaves_no_process(parent: subprocess.Popen):
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) == 4, "rollout process, server, and a worker of rewards and of evaluations"
    os.kill(parent.pid, signal.SIGKILL)
    assert not still_running(children)


FOREIGN = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
OWN = {"server": {"TORCHTITAN_GRPO_API_KEY", "TORCHTITAN_GRPO_ADMIN_KEY"}, "worker": set()}
DAEMON = """
import subprocess
subprocess.run("setsid nohup sleep 98765 >/dev/null 2>&1 &", shell=True)
def score(completions, **kwargs):
    return [1.0] * len(completions)
"""


def test_children_see_their_own_keys_alone_and_daemons_of_rewards_end(
    config: RolloutProcessConfig, open_link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("TORCHTITAN_GRPO_MONITOR_KEY", "TORCHTITAN_GRPO_TEACHER_KEY", *OWN["server"])
    for name in (*FOREIGN, *keys):
        monkeypatch.setenv(name, "secret")
    (tmp_path / "daemon.py").write_text(DAEMON)
    config.reward.functions = [f"{tmp_path}/daemon.py:score"]
    config.inference.python = None  # a process of its own, which /proc shows
    link = open_link(config)
    link.wait_ready(READY_SECONDS)
    found = {"server": 0, "worker": 0, "process": 0, "daemon": 0}
    for child in psutil.Process().children(recursive=True):
        words, environ = " ".join(child.cmdline()), child.environ()
        kinds = {
            "inference.embedded": "server",
            "scoring_worker": "worker",
            "sleep 98765": "daemon",
        }
        kinds["rollout.process"] = "process"
        kind = next((kind for word, kind in kinds.items() if word in words), None)
        if kind is not None and child.name() != "sh":
            found[kind] += 1
            seen = {name for name in (*FOREIGN, *keys) if name in environ}
            assert seen == OWN["server" if kind in ("server", "process") else "worker"], kind
    assert min(found.values()) >= 1, found
    link.close()
    assert not [p for p in psutil.process_iter(["cmdline"]) if "98765" in (p.info["cmdline"] or [])]
