# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A session with a calculator with turns, copies that are one turn, and a program that asks once."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from metric_page import undescribed
from prompt_files import process_config
from stub_clients import serving

from torchtitan.grpo.config import GRPO, Evaluation, Inference, Prompts, Reward, Rollout
from torchtitan.grpo.config.rollout_process import RolloutProcessConfig
from torchtitan.grpo.rollout.environments import EnvironmentFailed, EnvironmentsFailing
from torchtitan.grpo.rollout.input_check import check
from torchtitan.grpo.rollout.session import EvaluationSession, RolloutSession
from torchtitan.grpo.rollout.tokenizer import TextCodec

EOS = 1
GROUP_SIZE = 3
AGENT = """
async def run(client, row):
    answer = await client.completions.create(model="any", prompt=row["prompt"])
    return 0.25 if answer.choices[0].text == row["prompt"] else 0.0
"""
ROWS = {
    "sums": {"1+2->": "3", "2*4->": "8"},
    "copies": {"12": "12", "3": "4"},
    "calls": {"56": ""},
}
KEEP = """
def keep(prompts, completions, rewards):
    return [i > 0 for i in range(len(completions))]
"""


class Server:
    """Writes the sum of a prompt such as ``1+2->`` with the calculator, and copies others."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.longest: dict[str, set[int]] = {}  # max_new_tokens of each context's requests

    async def answer(self, request: web.Request) -> web.Response:
        if request.path != "/generate":
            told = {"embedded": True, "model_path": "", "data": [{}], "tp_size": 1}
            return web.json_response(told | {"vocab_size": 128, "weight_version": "0"})
        body = await request.json()
        context = self.codec.decode(body["input_ids"])
        asked, arrow, written = context.partition("->")
        most = body["sampling_params"]["max_new_tokens"]
        self.longest.setdefault(context, set()).add(most)
        text = asked if not arrow else "" if written else f"{asked}="
        ids = [*self.codec.encode_continuation(text), *([] if text.endswith("=") else [EOS])]
        meta = {
            "id": body["rid"],
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "finish_reason": {"type": "stop"},
            "weight_version": "0",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return web.json_response({"output_ids": ids, "meta_info": meta})


def tables(folder: Path) -> dict[str, dict[str, Any]]:
    for name, rows in ROWS.items():
        lines = [json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows.items()]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "keep.py").write_text(KEEP)
    (folder / "agent.py").write_text(AGENT)
    return {
        "sums": {
            "weight": 1,
            "prompts": {"path": str(folder / "sums.jsonl")},
            "rollout": {"environment": "calculator", "max_turns": 4},
            "reward": {"functions": ["environment"], "weights": [0.5]},
        },
        "copies": {
            "weight": 2,
            "prompts": {"path": str(folder / "copies.jsonl"), "template": "{prompt}"},
            "rollout": {"max_new_tokens": 5, "should_accept": f"{folder / 'keep.py'}:keep"},
            "reward": {"functions": ["exact_match"]},
        },
        "calls": {
            "weight": 1,
            "prompts": {"path": str(folder / "calls.jsonl")},
            "agent": {"function": f"{folder / 'agent.py'}:run"},
            "reward": {"functions": ["agent"]},
        },
    }


def config_of(repository: Path, folder: Path, url: str) -> RolloutProcessConfig:
    sets = {
        name: {"path": str(folder / f"{name}.jsonl"), "environment": name, "function": function}
        for name, function in (("sums", "environment"), ("copies", "exact_match"))
    }
    return process_config(
        repository / "assets/reverse_digits/model",
        Prompts(column="question", shuffle=False),
        grpo=GRPO(group_size=GROUP_SIZE, prompts_per_step=4),
        rollout=Rollout(max_new_tokens=20, max_head_offpolicyness=0),
        inference=Inference(kind="embedded", launch=False, urls=[url]),
        reward=Reward(timeout_seconds=60.0),
        evaluation=Evaluation(sets=sets),
        vocab_size=128,
        eos_token_ids=[EOS],
        dump_folder=str(folder),
        environments=tables(folder),
    )


@pytest.fixture
def server(repository: Path) -> Server:
    return Server(TextCodec(str(repository / "assets/reverse_digits/model"), [EOS]))


@asynccontextmanager
async def at_work(config: RolloutProcessConfig, url: str) -> AsyncIterator[RolloutSession]:
    session = RolloutSession(config)
    try:
        await session.open()
        session.dispatcher.set_version(url, 0)
        work = asyncio.create_task(session.producer.run())
        try:
            yield session
            assert not work.done(), work.exception()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    finally:
        await session.close()


async def test_each_prompt_has_the_turns_rewards_filters_and_limits_of_its_environment(
    repository: Path, tmp_path: Path, server: Server
):
    async with serving(server.answer) as url:
        config = config_of(repository, tmp_path, url)
        async with at_work(config, url) as session, asyncio.timeout(40):
            batch = await session.producer.batch(0)
            evaluator = session.evaluator
            assert evaluator is not None
            result = await evaluator.evaluate(0)
    of_file: dict[str, list[Any]] = {name: [] for name in ROWS}
    for group in batch.groups:
        of_file[group.file].append(group)
        assert group.columns["prompt_set"] == group.file
    assert [len(of_file[name]) for name in ROWS] == [1, 2, 1]

    (sums,), (calls,) = of_file["sums"], of_file["calls"]
    assert [(r.reward, r.reward_components) for r in calls.rollouts] == [
        (0.25, {"agent": 0.25})
    ] * GROUP_SIZE
    assert len(sums.rollouts) == GROUP_SIZE
    for rollout in sums.rollouts:
        assert (rollout.completion, rollout.reward) == ("1+2=3", 0.5)
        assert rollout.reward_components == {"environment": 1.0}
        assert rollout.sampled is not None and not rollout.sampled.all()
    for copies in of_file["copies"]:
        assert len(copies.rollouts) == GROUP_SIZE - 1, "rollout.should_accept is theirs alone"
        for rollout in copies.rollouts:
            assert rollout.reward_components == {"exact_match": rollout.reward}
    assert [group.rollouts[0].reward for group in of_file["copies"]] == [1.0, 0.0]
    assert (server.longest["1+2->"], server.longest["12"]) == ({20}, {5})

    metrics = batch.metrics
    assert metrics["reward/file/sums"] == 0.5 == metrics["reward/file/copies"]
    assert metrics["rollout/file/sums/fraction"] == 0.25
    assert metrics["agent/calls/requests"] == 1.0
    assert metrics["environment/sums/failed_episodes"] == 0
    assert metrics["environment/sums/step_seconds"] > 0
    assert not any(key.startswith("environment/copies/") for key in metrics)
    assert undescribed(metrics, ["environment", "exact_match", "agent"]) == []
    assert {one.name: (one.score, one.length_mean) for one in result.sets} == {
        "sums": (1.0, 6.0),  # with the calculator's digit
        "copies": (0.5, 2.5),
    }


async def test_what_each_environment_opens_is_told_by_its_keys(repository: Path, tmp_path: Path):
    config = config_of(repository, tmp_path, "http://127.0.0.1:1")
    report = await check(config, lambda text: None)
    assert report.error is None
    for line in (
        f"environments.sums.prompts.path: {tmp_path / 'sums.jsonl'}, 2 rows, prompts of at most 44 tokens",
        f"environments.copies.prompts.path: {tmp_path / 'copies.jsonl'}, 2 rows, prompts of at most 59 tokens",
        "environments.sums.rollout.environment: calculator, turns end at ['=']",
        "environments.sums.reward.functions: environment, weight 0.5; an empty completion of the first "
        "prompt earns 0",
        "environments.copies.reward.functions: exact_match, weight 1; an empty completion of the first "
        "prompt earns 0",
        f"environments.copies.rollout.should_accept: {tmp_path / 'keep.py'}:keep",
        "  with the settings of environments.sums",
    ):  # fmt: skip
        assert line in report.lines, report.lines
    (tmp_path / "copies.jsonl").write_text('{"question": "1"}\n')
    report = await check(config, lambda text: None)
    assert report.error is not None
    assert report.error.startswith("environments.copies: ") and "exact_match" in report.error
    del config.environments["copies"]
    config.environments["sums"]["rollout"]["environment"] = f"{tmp_path}/none.py:Game"
    del config.evaluation.sets["copies"]
    report = await check(config, lambda text: None)
    assert report.error is not None and "none.py does not exist" in report.error
    assert report.error.startswith("environments.sums: ")


async def test_episodes_that_all_fail_end_the_run_and_name_their_environment(
    repository: Path, tmp_path: Path
):
    config = config_of(repository, tmp_path, "http://127.0.0.1:1")
    config.rollout.max_consecutive_failures = 1
    session = RolloutSession(config)
    try:
        await session.open_inputs()
        sums, calls = (session.inputs.environments[name] for name in ("sums", "calls"))
        assert sums.players is not None and calls.players is not None
        for limit, key in (
            (sums.players.limit, "environments.sums.rollout.environment"),
            (calls.players.limit, "environments.calls.agent.function"),
        ):
            with pytest.raises(EnvironmentsFailing, match=f"1 episodes of {key} in a row failed"):
                limit.record_failure(EnvironmentFailed("crash", "It ended."))
    finally:
        await session.close()


async def test_an_evaluation_without_a_run_starts_what_its_sets_need(
    repository: Path, tmp_path: Path, server: Server
):
    async with serving(server.answer) as url:
        config = config_of(repository, tmp_path, url)
        del config.evaluation.sets["copies"]
        session = EvaluationSession(config, lambda text: None)
        try:
            await session.open()
            async with asyncio.timeout(40):
                (sums,) = (await session.evaluate()).sets
            assert (sums.name, sums.score) == ("sums", 1.0)
        finally:
            await session.close()
