# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An evaluation beside training whose servers are lost: training goes on, with the one that is left."""

import os
import signal

import pytest

LAST = 24
# Beside the first steps, it waits until the run has taken more steps than rollouts of the weights
# of step 1 suffice for.
WAITING = """
import time
from pathlib import Path

metrics = Path({folder!r}) / "metrics.jsonl"

def num_steps():
    return metrics.read_bytes().count(b"\\n") if metrics.exists() else 0

def scorer(completions, answer, **kwargs):
    until = time.monotonic() + 300
    while 0 < num_steps() < {last} - 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert num_steps() == 0 or num_steps() >= {last} - 2, "training has stalled"
    return [float(c == a) for c, a in zip(completions, answer)]
"""


def versions(run) -> list[float]:
    """Returns what the two servers served at the last step."""
    return [run.metrics[-1][f"weight_sync/server{index}/version"] for index in range(2)]


@pytest.mark.long
def test_the_server_of_an_evaluation_keeps_training_going_when_the_other_is_lost(
    make_run, serve, tmp_path
):
    servers = [serve(), serve()]
    run = make_run(
        "--inference.no-launch", f"--inference.urls={','.join(s.url for s in servers)}",
        "--grpo.prompts_per_step=2", f"--training.steps={LAST}", "--evaluation.interval=1",
        "--evaluation.num_prompts=4", "--rollout.max_head_offpolicyness=2",
        f"--evaluation.function={tmp_path / 'waiting.py'}:scorer", "--reward.timeout_seconds=400",
        "--weight_sync.timeout_seconds=20",
    )  # fmt: skip
    (tmp_path / "waiting.py").write_text(WAITING.format(folder=str(run.folder), last=LAST))
    run.start()
    # The evaluation of step 1 waits, one server is left at its weights, and the other one goes on.
    run.wait_for(lambda: bool(run.metrics) and max(versions(run)) >= min(versions(run)) + 2)
    served = versions(run)
    other = servers[served.index(max(served))]
    os.killpg(other.process.pid, signal.SIGKILL)
    assert run.finish(240) == 0
    first, *beside, last = run.records("evaluations.jsonl")
    assert (first["step"], last["step"]) == (0, LAST)
    assert beside and beside[0]["evaluation/begun_again"] == 1
    assert beside[0]["step"] > 1, "the evaluation of step 1 was begun again with newer weights"
    assert all(record["staleness/max_steps"] <= 2 for record in run.metrics)
    run.wait_until_processes_end()
