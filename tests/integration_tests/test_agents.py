# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whole runs with agents: the trained tokens, and what is killed at random times."""

import random
import subprocess
import sys
from collections.abc import Callable

PROGRAM = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"prompt": row["prompt"]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
right = sum(a == b for a, b in zip(answer["choices"][0]["text"], row["answer"]))
print(json.dumps({"reward": right / len(row["answer"])}))
"""


def test_what_an_agent_asked_for_is_read_and_only_answers_are_trained(
    make_run: Callable, repository, tmp_path
) -> None:
    """Without staleness, the trainer's logprobs equal the server's token by token only if each row
    holds exactly what the server was sent, and only what the model wrote is trained."""
    script = repository / "scripts/make_calculator_task.py"
    command = [sys.executable, str(script), "--output", str(tmp_path)]
    subprocess.run(command, check=True, timeout=800, capture_output=True)
    run = make_run(
        f"--model.hf_assets_path={tmp_path / 'model'}", f"--prompts.path={tmp_path / 'train.jsonl'}",
        f"--evaluation.path={tmp_path / 'heldout.jsonl'}", "--evaluation.num_prompts=16",
        "--grpo.prompts_per_step=6", "--training.steps=3", "--rollout.max_head_offpolicyness=0",
        config="calculator_agent", num_ranks=1,
    ).succeed()  # fmt: skip
    for step in run.metrics:
        assert step["mismatch/kl"] < 1e-9
        assert step["agent/failed_episodes"] == 0
        assert step["agent/rows"] == step["agent/conversations"] == 1
        assert 1 < step["agent/requests"] <= 4
        assert 0 < step["reward/agent"] == step["reward/mean"] < 1
    assert 0.5 < run.summary["heldout_before"] <= 1
    run.wait_until_processes_end()


def test_kills_at_random_times_lose_and_repeat_nothing(make_run: Callable, tmp_path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    run = make_run(
        "--agent.command", sys.executable, str(tmp_path / "agent.py"),
        "--reward.functions=agent", "--grpo.prompts_per_step=4", "--training.steps=6",
        "--evaluation.num_prompts=4", "--evaluation.function=agent", "--inference.num_servers=2",
        num_ranks=1,
    )  # fmt: skip
    run.start()
    victims = ["agent.py", "torchtitan.grpo.rollout.process", "torchtitan.grpo.inference.embedded"]
    rng.shuffle(victims)
    for step, victim in enumerate(victims, 1):
        run.wait_for_step(step)
        run.wait_for(lambda: run.processes(victim))  # noqa: B023
        rng.choice(run.processes(victim)).kill()
    assert run.finish() == 0, run.console[-6000:]
    assert len(run.metrics) == 6
    run.fates()
    for line in run.records("ledger.jsonl"):
        assert len(line["trained"]) == 4
    run.wait_until_processes_end()
