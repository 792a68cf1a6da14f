"""Servers that die, freeze, or come back with old weights: the run continues, and they rejoin."""

import os
import signal

import pytest

# Long enough for a server to come back, short of completions to wait for.
ARGUMENTS = (
    "--inference.no-launch", "--grpo.prompts_per_step=2", "--training.steps=10000",
    "--evaluation.num_prompts=8", "--inference.control_timeout_seconds=3",
    "--weight_sync.timeout_seconds=5",
)  # fmt: skip


LOST, VERSION = "weight_sync/lost_servers", "weight_sync/server_version"


def wait_for_record(run, holds):
    seen = len(run.metrics)
    run.wait_for(lambda: any(holds(record) for record in run.metrics[seen:]))
    return next(record for record in run.metrics[seen:] if holds(record))


@pytest.mark.parametrize("bound", [0, pytest.param(1, marks=pytest.mark.long)])
def test_servers_that_die_or_freeze_rejoin_with_the_newest_weights(make_run, serve, bound):
    first, second = serve(), serve()
    run = make_run(
        *ARGUMENTS, f"--rollout.max_head_offpolicyness={bound}",
        f"--inference.urls={first.url},{second.url}",
    )  # fmt: skip
    run.start()
    run.wait_for_step(5)

    os.killpg(second.process.pid, signal.SIGKILL)
    second.process.wait(10)
    alone = wait_for_record(run, lambda r: r[LOST] == 1)
    # The other server's pushes go on.
    wait_for_record(run, lambda r: r[VERSION] > alone["step"] + 2)

    # It comes back under its address with the original weights, which must not be trained on
    # as anything newer: it is lost until it has confirmed the newest.
    second = serve(int(second.url.rsplit(":", 1)[1]))
    wait_for_record(run, lambda r: r[LOST] == 0 and r[VERSION] >= r["step"] - 3)

    os.killpg(second.process.pid, signal.SIGSTOP)
    frozen = wait_for_record(run, lambda r: r[LOST] == 1)
    wait_for_record(run, lambda r: r[VERSION] > frozen["step"] + 2)
    os.killpg(second.process.pid, signal.SIGCONT)
    wait_for_record(run, lambda r: r[LOST] == 0)

    assert run.process is not None
    os.killpg(run.process.pid, signal.SIGTERM)
    run.finish(30)
    assert all(record["staleness/max_steps"] <= bound for record in run.metrics)
    if bound == 0:
        # Tokens of any other weights than the newest would show. With a bound of 1 they would not:
        # one step of so few prompts can change the policy as much as all the steps before.
        assert max(record["mismatch/kl"] for record in run.metrics) < 1e-6
    run.wait_until_processes_end()


def test_a_lone_server_restarted_between_pushes_is_noticed_and_rejoins(make_run, serve):
    """Without staleness no batch arrives, so no push would notice the restart."""
    server = serve()
    run = make_run(
        *ARGUMENTS, "--rollout.max_head_offpolicyness=0", f"--inference.urls={server.url}"
    )
    run.start()
    run.wait_for_step(3)
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(10)
    steps = len(run.metrics)
    serve(int(server.url.rsplit(":", 1)[1]))
    run.wait_for_step(steps + 3)
    for record in run.metrics:
        assert record["staleness/max_steps"] == 0
        assert record["mismatch/kl"] < 1e-6
    assert run.process is not None
    os.killpg(run.process.pid, signal.SIGTERM)
    run.finish(30)
    run.wait_until_processes_end()
