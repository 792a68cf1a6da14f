"""Servers that answer nonsense and rewards that misbehave: both are refused and counted, and the run continues.

What is not trained on stands in the ledger with a reason, and nothing is trained on twice.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from corrupting_proxy import MODES, CorruptingProxy
from proxy import running_beside

# Of requests; two kinds of bad answers are found out by it alone.
PATIENCE_SECONDS = 3.0
# The policy that wrote an answer and the one trained on it are then close. At the quickstart's
# rate, one step with small batches may move the tiny model's end of sequence from 35 % to 0.5 %.
SLOW_LEARNING = "--optimizer.lr=1e-4"


def sum_of(run, key: str) -> float:
    return sum(record[key] for record in run.metrics)


def assert_learned_from_nothing_bad(run, num_steps: int) -> None:
    assert len(run.metrics) == num_steps
    for record in run.metrics:
        assert np.isfinite([record[k] for k in ("reward/mean", "reward/std", "grad_norm")]).all()
        # Below 0.002 with SLOW_LEARNING: the logprobs of a single other answer stand out.
        assert record["mismatch/kl"] < 0.02


def test_a_run_on_a_server_of_bad_answers_ends_well(make_run, serve):
    """Weights are pushed through the proxy, which forwards the control routes."""
    num_steps = 10
    # Of a tenth of the prompts no answer is good: they are given up.
    proxy = CorruptingProxy(serve().url, every=5, is_doomed=lambda ids: ids[0] == ids[1])
    with running_beside(proxy):
        run = make_run(
            "--inference.no-launch", f"--inference.urls={proxy.url}",
            f"--training.steps={num_steps}", "--grpo.prompts_per_step=4", "--grpo.group_size=4",
            f"--rollout.request_timeout_seconds={PATIENCE_SECONDS}", SLOW_LEARNING,
            "--rollout.max_concurrent_rollouts=16", "--evaluation.num_prompts=8",
        )  # fmt: skip
        run.succeed()
    assert_learned_from_nothing_bad(run, num_steps)
    reasons = run.fates()
    assert reasons["failed"] == sum_of(run, "rollout/failed_groups") > 0
    assert set(reasons) == {"failed"}
    assert set(proxy.spoiled) == set(MODES)
    # What was not read was not sent: buffers on the way hold some MiB of it.
    assert proxy.num_endless_bytes < 64 * 2**20
    # What failed after the last batch, and in the evaluations, is in no record.
    assert 0.5 * proxy.spoiled.total() < sum_of(run, "rollout/failed_requests")
    # On a busy machine, a good answer may come too late.
    most = proxy.spoiled.total() + proxy.num_given_up
    assert sum_of(run, "rollout/failed_requests") <= most
    assert run.metrics[-1]["weight_sync/server_version"] >= num_steps - 2
    assert_dropped_is_told(run, "answers that cannot be used", "groups without enough completions")
    run.wait_until_processes_end()


def assert_dropped_is_told(run, *kinds: str) -> None:
    for kind in kinds:
        assert 1 <= run.console.count(f"First of the {kind}: ") <= 3, run.console
    assert " dropped: " in run.console
    assert run.console.count("Dropped in this run: ") == 1


REWARDS = '''
import ctypes, fcntl, os, sys, time

LOG = {log!r}
LINE = 24

def turn(behavior_of):
    """What is done this time, and a line of it in the log, where all workers count."""
    file = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        number = os.fstat(file).st_size // LINE
        behavior = behavior_of(number)
        os.write(file, f"{{behavior}} {{os.getpid()}}".ljust(LINE - 1).encode() + b"\\n")
    finally:
        os.close(file)
    return behavior

def write_on_channel():
    for file in range(3, 32):
        try:
            os.write(file, b"\\x03\\x00\\x00\\x00\\xff\\xff\\xff")
        except OSError:
            pass

def hang():
    while True:
        time.sleep(1)

BAD = {{
    "hang": hang,
    "exit": lambda: os._exit(3),
    "sys_exit": lambda: sys.exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "raise": lambda: {{}}["no such key"],
    "channel": write_on_channel,
    "nan": lambda: [float("nan")] * 4,
    "inf": lambda: [float("inf")] * 4,
    "huge": lambda: [1e300, -1e300, 1e300, -1e300],
    "text": lambda: ["good"] * 4,
    "no_list": lambda: 1.0,
    "short": lambda: [1.0],
    "none": lambda: [None, None, None, 1.0],
}}
GOOD = ["good", "slow"]

def honest(completions, answer):
    return [sum(a == b for a, b in zip(c, w)) / len(w) for c, w in zip(completions, answer)]

def is_first_check(completions):
    return completions == [""]

def moody(completions, answer, **kw):
    if is_first_check(completions):
        return [0.0]
    behaviors = [name for bad in BAD for name in (bad, GOOD[len(bad) % 2])]
    behavior = turn(lambda number: behaviors[number % len(behaviors)])
    if behavior in BAD:
        return BAD[behavior]()
    if behavior == "slow":
        time.sleep(0.5)
    return honest(completions, answer)
'''


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS.format(log=str(tmp_path / "calls.log")))
    return file


def test_a_run_with_a_reward_that_misbehaves_ends_well(make_run, rewards):
    """For every second group the reward hangs, crashes, is slow, or returns something invalid."""
    num_steps = 8
    run = make_run(
        f"--training.steps={num_steps}", "--grpo.prompts_per_step=4", "--grpo.group_size=4",
        "--rollout.max_concurrent_rollouts=16", "--evaluation.num_prompts=8",
        f"--reward.functions={rewards}:moody", "--reward.num_workers=2",
        "--reward.timeout_seconds=5", SLOW_LEARNING,
    )  # fmt: skip
    run.succeed()
    assert_learned_from_nothing_bad(run, num_steps)
    for record in run.metrics:
        assert 0 <= record["reward/mean"] <= 1
    calls = [line.split() for line in rewards.with_name("calls.log").read_text().splitlines()]
    behaviors = Counter(behavior for behavior, _ in calls)
    num_bad = len(calls) - behaviors["good"] - behaviors["slow"]
    assert len(behaviors) == 15, behaviors
    reasons = run.fates()
    assert set(reasons) == {"unscored"}
    # All but those after the last batch.
    assert num_bad - 16 <= reasons["unscored"] == sum_of(run, "rollout/unscored_groups")
    assert 13 <= reasons["unscored"] <= num_bad
    assert_dropped_is_told(run, "rewards that raised", "rewards that took too long")
    assert "raised KeyError: 'no such key' (at " in run.console
    # Four of the behaviors end the worker; another one takes its place.
    workers = {int(pid) for _, pid in calls}
    assert len(workers) >= 2 + 4
    run.wait_until_processes_end()
    assert not [pid for pid in workers if psutil.pid_exists(pid)]
