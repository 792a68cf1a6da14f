# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Distillation on policy with real teachers: what they rate, and what becomes of a lost one."""

import os
import signal

import pytest
from server_kinds import LONG, held_port, python_of

from torchtitan.grpo.data.record import RecordReader
from torchtitan.grpo.inference.kinds import ServerSpec
from torchtitan.grpo.inference.local_servers import start_server

TAUGHT = (
    "--grpo.prompts_per_step=4", "--evaluation.num_prompts=1", "--training.steps=12",
    "--optimizer.lr=1e-3", "--prompts.max_prompt_tokens=32",
    "--rollout.temperature=1",
)  # fmt: skip
TOP_K = 8
ALONE = ("--reward.functions", "[]")


def test_a_teacher_that_is_the_student_itself_finds_no_divergence(make_run, serve):
    """Each token is rated under the same context: a shift by one would show at once."""
    teacher = serve()
    run = make_run(
        *TAUGHT, *ALONE, f"--teacher.urls={teacher.url}", "--rollout.max_head_offpolicyness=0",
        "--training.steps=2", "--optimizer.lr=0", "--prompts.no-single_rank_load",
    ).succeed()  # fmt: skip
    for record in run.metrics:
        assert abs(record["teacher/reverse_kl"]) < 1e-5
        # Rounding gives norms of 1e-6 to 1e-4, and a reverse_kl of only 0.0003 gives one of 0.3.
        assert record["grad_norm"] < 1e-2
        assert record["rollout/unrated_groups"] == 0


def test_a_teacher_killed_and_restarted_in_mid_run_loses_nothing(make_run, serve, tmp_path):
    teacher = serve()
    record = tmp_path / "run/rollouts.jsonl"
    options = (*TAUGHT, f"--teacher.top_k={TOP_K}")
    run = make_run(*options, f"--teacher.urls={teacher.url}", f"--rollout.record={record}")
    run.start()
    run.wait_for_step(3)
    os.killpg(teacher.process.pid, signal.SIGKILL)
    teacher.process.wait(10)
    # Groups that were not rated yet wait: the run comes to a stop, without an untaught step.
    run.wait_for(lambda: "First of the ratings that a teacher did not give" in run.console)
    serve(int(teacher.url.rsplit(":", 1)[1]))
    assert run.finish() == 0, run.console[-6000:]
    run.check_metrics()
    assert len(run.metrics) == 12
    assert sum(step["rollout/failed_ratings"] for step in run.metrics) > 0
    assert sum(step["rollout/unrated_groups"] for step in run.metrics) == 0
    assert all("teacher/top_k_kl" in step for step in run.metrics)
    assert not run.fates()
    assert sum(len(line["trained"]) for line in run.records("ledger.jsonl")) == 12 * 4
    reader = RecordReader(str(record), None, None, "rollout.record")
    rollouts = [r for _, batch in reader for group in batch.groups for r in group.rollouts]
    assert all(r.teacher_logprobs is not None for r in rollouts)
    assert all(len(r.teacher_logprobs) == len(r.token_ids) for r in rollouts)
    # The replay learns the same from the ratings in the file, without a teacher.
    replay = make_run(*options, f"--rollout.replay={record}", name="replay").succeed()
    for mine, theirs in zip(replay.metrics, run.metrics, strict=True):
        for name in ("loss/total", "grad_norm", "teacher/reverse_kl", "teacher/top_k_kl"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("top_k", [0, TOP_K])
@pytest.mark.parametrize("kind", LONG)
def test_a_run_is_taught_by_a_real_server(make_run, repository, tmp_path, kind, top_k):
    model = str(repository / "assets/reverse_digits/model")
    spec = ServerSpec(kind, model, held_port(), "cpu", "float32", 257, 32, python=python_of(kind))
    teacher = start_server(spec, tmp_path / f"{kind}.log")
    try:
        run = make_run(
            *TAUGHT, *ALONE, f"--teacher.urls={teacher.url}", f"--teacher.kind={kind}",
            f"--teacher.top_k={top_k}", "--rollout.max_head_offpolicyness=0", "--training.steps=3",
        ).succeed()  # fmt: skip
    finally:
        teacher.stop()
    # The teacher is the student itself at first, and stays behind as the student moves.
    name = "teacher/top_k_kl" if top_k else "teacher/reverse_kl"
    assert abs(run.metrics[0][name]) < 1e-3
    assert all(record["rollout/unrated_groups"] == 0 for record in run.metrics)
