# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whole runs with several turns: the embedded server, the calculator, and the trained tokens."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.grpo.rollout.environments.calculator import CannotCalculate, calculate


@pytest.fixture(scope="module")
def task(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's prompts and its model, which uses the calculator correctly about half of the time."""
    folder = tmp_path_factory.mktemp("calculator")
    script = repository / "scripts/make_calculator_task.py"
    command = [sys.executable, str(script), "--output", str(folder)]
    subprocess.run(command, check=True, timeout=280, capture_output=True)
    return folder


def arguments(task: Path) -> list[str]:
    return [
        f"--model.hf_assets_path={task / 'model'}",
        f"--prompts.path={task / 'train.jsonl'}",
        f"--evaluation.path={task / 'heldout.jsonl'}",
        "--grpo.prompts_per_step=6",
        "--evaluation.num_prompts=16",
        "--observe.samples_per_step=48",
        "--training.steps=4",
    ]


@pytest.mark.parametrize("segment_tokens", [0, 3])
def test_what_the_environment_put_in_is_read_and_not_trained(make_run, task, segment_tokens):
    """Without staleness, the trainer's logprobs equal the server's token by token only if the
    trainer reads the same context and trains on no token that the environment inserted."""
    run = make_run(
        *arguments(task),
        "--rollout.max_head_offpolicyness=0",
        f"--rollout.segment_tokens={segment_tokens}",
        config="calculator",
    ).succeed()
    for record in run.metrics:
        assert record["staleness/max_steps"] == 0
        assert record["mismatch/kl"] < 1e-6
        assert record["environment/failed_episodes"] == 0
        assert 0 < record["reward/environment"] == record["reward/mean"] < 1
    assert run.summary["mismatch_kl_mean"] < 1e-6
    assert 0.5 < run.summary["heldout_before"] <= 1
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    answered = 0
    for sample in samples:
        for turn in sample["context"]:
            assert turn["trained"] == (turn["role"] == "model")
        written = "".join(turn["text"] for turn in sample["context"][1:])
        assert written.removesuffix("<eos>") == sample["completion"]
        call, equals, rest = sample["completion"].partition("=")
        if not equals or sample["finish_reason"] != "stop":
            continue
        try:
            result = str(calculate(call))
        except CannotCalculate:
            continue  # it was an error, or no call
        assert rest.startswith(result)
        roles = [turn["role"] for turn in sample["context"]]
        assert roles[:4] == ["prompt", "model", "environment", "model"]
        assert sample["context"][2]["text"] == result
        answered += 1
    assert answered >= 5
    run.wait_until_processes_end()


def test_a_run_resumes_amid_episodes(make_run, task):
    checkpoint = (
        "--checkpoint.enable", "--checkpoint.interval=2", "--rollout.segment_tokens=4",
    )  # fmt: skip
    first = make_run(*arguments(task), *checkpoint, config="calculator").succeed()
    assert list((first.folder / "rollouts").glob("step-4.msgpack"))
    again = [a for a in arguments(task) if not a.startswith("--training.steps")]
    second = make_run(*again, *checkpoint, "--training.steps=6", config="calculator").succeed()
    assert [record["step"] for record in second.metrics] == [1, 2, 3, 4, 5, 6]
    assert all(record["environment/failed_episodes"] == 0 for record in second.metrics)


def test_a_replay_of_several_turns_trains_as_the_run_did(make_run, task, tmp_path):
    record = tmp_path / "rollouts.jsonl.gz"
    live = make_run(
        *arguments(task), f"--rollout.record={record}", "--training.steps=2",
        config="calculator", num_ranks=1, name="live",
    ).succeed()  # fmt: skip
    replayed = make_run(
        f"--model.hf_assets_path={task / 'model'}", f"--rollout.replay={record}",
        "--training.steps=2", config="calculator", num_ranks=1, name="replayed",
    ).succeed()  # fmt: skip
    for mine, theirs in zip(replayed.metrics, live.metrics, strict=True):
        for name in ("loss/policy", "grad_norm", "mismatch/kl"):
            assert mine[name] == theirs[name]


def test_an_environment_that_hangs_ends_the_run_and_says_so(make_run, task, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "from torchtitan.grpo.rollout.environments import Environment\n"
        "class Hanging(Environment):\n"
        "    async def step(self, text, token_ids):\n"
        "        time.sleep(1000)\n"
    )
    run = make_run(
        *arguments(task),
        f"--rollout.environment={tmp_path / 'mine.py'}:Hanging",
        "--rollout.environment_timeout_seconds=1",
        "--rollout.max_consecutive_failures=8",
        config="calculator",
    )
    # More than that many may have failed at once.
    failed = re.search(
        r"(\d+) episodes of rollout.environment in a row failed "
        r"\(rollout.max_consecutive_failures = 8\)",
        run.fail(),
    )
    assert failed is not None and int(failed[1]) >= 8
    # The last failure may be that of an episode whose process another one's hanging has ended.
    log = (run.folder / "rollout_process.log").read_text()
    assert "longer than rollout.environment_timeout_seconds = 1" in log
