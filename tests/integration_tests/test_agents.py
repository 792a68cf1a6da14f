# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whole runs with agents: the trained tokens, and what is killed at random times."""

import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_world import VOCAB, Written, answers_in, make_model
from rewriting_agent import KINDS
from server_kinds import python_of

from torchtitan.grpo.data.record import RecordReader

TEMPERATURE = 0.8  # of the quickstart's configuration
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


@pytest.mark.parametrize(
    ("server", "bound"),
    [
        ("embedded", 1e-9),
        # Real servers give no probability to ids without a token, of which this model has 30.
        pytest.param("vllm", 1e-4, marks=[pytest.mark.vllm, pytest.mark.long]),
        pytest.param("sglang", 1e-4, marks=[pytest.mark.sglang, pytest.mark.long]),
    ],
)
def test_what_an_agent_asked_for_is_read_and_only_answers_are_trained(
    server: str, bound: float, make_run: Callable, calculator_task: Path
) -> None:
    """Without staleness, the trainer's logprobs equal the server's token by token only if each row
    holds exactly what the server was sent, and only what the model wrote is trained."""
    python = python_of(server) if server != "embedded" else sys.executable
    run = make_run(
        f"--model.hf_assets_path={calculator_task / 'model'}",
        f"--prompts.path={calculator_task / 'train.jsonl'}",
        f"--evaluation.path={calculator_task / 'heldout.jsonl'}", "--evaluation.num_prompts=16",
        "--grpo.prompts_per_step=6", "--training.steps=3", "--rollout.max_head_offpolicyness=0",
        f"--inference.kind={server}", f"--inference.python={python}",
        config="calculator_agent", num_ranks=1,
    ).succeed()  # fmt: skip
    for step in run.metrics:
        assert step["mismatch/kl"] < bound
        assert step["agent/failed_episodes"] == 0
        # One of some 4000 sampled tokens is <pad> or <unk>, and is not in the text that the program sends back. That
        # text then begins a conversation or, behind the first answer, a branch of one, which is a row.
        assert 1 <= step["agent/conversations"] <= step["agent/rows"] < 1.1
        assert 1 < step["agent/requests"] <= 4
        assert 0 < step["reward/agent"] == step["reward/mean"] < 1
    assert 0.5 < run.summary["heldout_before"] <= 1
    run.wait_until_processes_end()


def test_every_way_to_rewrite_a_conversation_trains_what_was_sent_once(
    make_run: Callable, repository: Path, tmp_path: Path
) -> None:
    """Each step has one prompt of each kind, so its numbers are exact: answers that the program
    received, with their contexts and logprobs, are what is trained, and nothing else is."""
    num_steps, group_size, record = 2, 2, tmp_path / "rollouts.jsonl"
    rows = [
        {"question": str(1000 + number), "kind": kind, "number": number}
        # The last prompts are for episodes that begin behind the last step.
        for number, kind in enumerate([*KINDS] * (num_steps + 1))
    ]
    write_prompts(tmp_path / "train.jsonl", rows, tmp_path / "sent.jsonl")
    run = make_run(
        f"--model.hf_assets_path={make_model(repository, tmp_path)}",
        f"--prompts.path={tmp_path / 'train.jsonl'}", "--prompts.no-shuffle",
        f"--agent.function={repository / 'tests/programs/rewriting_agent.py'}:run",
        f"--grpo.prompts_per_step={len(KINDS)}", f"--grpo.group_size={group_size}",
        f"--training.steps={num_steps}", "--training.seq_len=512", "--reward.functions=agent",
        "--rollout.max_head_offpolicyness=0", f"--rollout.record={record}",
        config=unevaluated(repository, tmp_path),
    ).succeed()  # fmt: skip
    received: dict[int, list[Written]] = {number: [] for number in range(len(rows))}
    for line in map(json.loads, (tmp_path / "sent.jsonl").read_text().splitlines()):
        received[line["number"]] += [(ids, own, logprobs) for ids, own, logprobs in line["sent"]]
    batches = [
        batch for _, batch in RecordReader(str(record), VOCAB, TEMPERATURE, "rollout.record")
    ]
    for step, batch in zip(run.metrics, batches, strict=True):
        for group in batch.groups:
            trained = [answer for one in group.rollouts for answer in answers_in(one)]
            assert sorted(trained) == sorted(received[group.group_id]), rows[group.group_id]
        sent = [answer for group in batch.groups for answer in received[group.group_id]]
        assert len(sent) == group_size * sum(kind.requests for kind in KINDS.values())
        assert step["data/trained_tokens"] == sum(len(own) for _, own, _ in sent)
        for name in ("rows", "conversations", "requests"):
            expected = sum(getattr(kind, name) for kind in KINDS.values()) / len(KINDS)
            # Metrics have seven digits.
            assert step[f"agent/{name}"] == pytest.approx(expected, rel=1e-6), name
        assert step["agent/failed_episodes"] == 0
        assert step["mismatch/kl"] < 1e-9
    run.wait_until_processes_end()


def unevaluated(repository: Path, folder: Path) -> Path:
    """Returns the quickstart's configuration without evaluations, which are episodes as well."""
    text = (repository / "train_configs/quickstart.toml").read_text()
    file = folder / "unevaluated.toml"
    file.write_text(text.partition("[evaluation]")[0])
    return file


def write_prompts(file: Path, rows: list[dict[str, Any]], log: Path) -> None:
    with file.open("w") as lines:
        for row in rows:
            messages = [{"role": "user", "content": row["question"]}]
            lines.write(json.dumps(row | {"prompt": messages, "log": str(log)}) + "\n")


def test_kills_at_random_times_lose_and_repeat_nothing(make_run: Callable, tmp_path) -> None:
    """The last kill hits the trainer, after a checkpoint, and a second run goes on from it."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    arguments = (
        "--agent.command", sys.executable, str(tmp_path / "agent.py"),
        "--reward.functions=agent", "--grpo.prompts_per_step=4", "--training.steps=10",
        "--evaluation.num_prompts=4", "--evaluation.function=agent", "--inference.num_servers=2",
        "--checkpoint.enable", "--checkpoint.interval=2",
        f"--rollout.record={tmp_path / 'run/rollouts.jsonl'}",
    )  # fmt: skip
    run = make_run(*arguments, num_ranks=1)
    run.start()

    def has_killed(victim: str) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # a program ends by itself
            rng.choice(run.processes(victim)).kill()
            return True
        return False

    victims = ["agent.py", "torchtitan.grpo.rollout.process", "torchtitan.grpo.inference.embedded"]
    rng.shuffle(victims)
    for step, victim in zip((1, 3, 5), victims, strict=True):
        # Two steps later, new servers serve: one that ends as it starts would end the run.
        run.wait_for_step(step)
        run.wait_for(lambda: has_killed(victim))  # noqa: B023
    run.wait_for_step(rng.randrange(7, 9))
    time.sleep(rng.random() / 2)
    (trainer,) = psutil.Process(run.process.pid).children()
    trainer.kill()
    assert run.finish() != 0
    run.wait_until_processes_end()
    assert len(run.metrics) < 10

    resumed = make_run(*arguments, num_ranks=1)
    resumed.start()
    assert resumed.finish() == 0, resumed.console[-6000:]
    assert re.search(r"Resumes after step [468] from ", resumed.console), resumed.console
    assert [record["step"] for record in resumed.metrics] == list(range(1, 11))
    resumed.fates()
    for line in resumed.records("ledger.jsonl"):
        assert len(line["trained"]) == 4
    record = RecordReader(
        str(resumed.folder / "rollouts.jsonl"), VOCAB, TEMPERATURE, "rollout.record"
    )
    num_lost = 0
    for step, (_, batch) in zip(resumed.metrics, record, strict=True):
        lengths = [len(group.rollouts) for group in batch.groups]
        assert max(lengths) <= 8
        num_lost += 8 * 4 - sum(lengths)
        rewards = [one.reward for group in batch.groups for one in group.rollouts]
        assert step["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert num_lost <= 1, "the program that was killed fails alone"
    resumed.wait_until_processes_end()


CRASHING = """
async def run(client, row):
    answer = await client.completions.create(model="policy", prompt=row["prompt"], max_tokens=8)
    if "5" in answer.choices[0].text:
        raise ValueError("5 is not understood")
    return 1.0
"""


@pytest.mark.parametrize("settings", [["--guards.unscored=stop"], ["--reward.unscorable_value=-1"]])
def test_answers_on_which_a_program_crashes_are_told_or_trained_with_their_value(
    make_run: Callable[..., Any], tmp_path: Path, settings: list[str]
) -> None:
    (tmp_path / "agent.py").write_text(CRASHING)
    run = make_run(
        f"--agent.function={tmp_path / 'agent.py'}:run", "--reward.functions=agent",
        "--training.steps=3", "--grpo.prompts_per_step=4", "--grpo.group_size=4",
        "--rollout.max_concurrent_rollouts=32", "--evaluation.num_prompts=0", "--optimizer.lr=1e-4",
        "--rollout.max_consecutive_failures=1000", *settings, num_ranks=2,
    )  # fmt: skip
    if "--guards.unscored=stop" in settings:
        message = run.fail()
        assert "Guard at step 1: rollout/unscored_fraction is 0." in message
        assert "by policy, 0 by service, 0 by function). With guards.unscored = 'stop'" in message
        return
    run.succeed()
    assert max(step["rollout/unscorable_fraction"] for step in run.metrics) > 0
    for step in run.metrics:
        assert step["rollout/unscored_fraction"] == step["guards/unscored"] == 0
    trained = run.records("samples.jsonl")
    assert {(sample["reward"], "5" in sample["completion"]) for sample in trained} <= {
        (1.0, False), (-1.0, True),
    }  # fmt: skip
    assert min(step["reward/mean"] for step in run.metrics) < 1
