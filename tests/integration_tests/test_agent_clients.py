# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Real clients, unchanged and in processes of their own, and the rows that their requests lead to."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from agent_world import Played, make_model, playing, prompt_of

from torchtitan.grpo.config import Agent, Rollout, Workers
from torchtitan.grpo.rollout.agents.programs import make_programs
from torchtitan.grpo.rollout.agents.verifiers import write_prompts
from torchtitan.grpo.workers.owner import CallFailed

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><eos>'
CLIENTS = ["sync_client", "lite", "agents_sdk", "graph"]


@pytest.fixture(scope="module")
def model(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(repository, tmp_path_factory.mktemp("agents"))


@pytest.mark.parametrize("name", CLIENTS)
async def test_an_episode_of_a_client_is_one_row(model: Path, repository: Path, name: str) -> None:
    python = repository / ".venv-clients/bin/python"
    file = repository / f"tests/programs/clients/{name}.py"
    failed: list[CallFailed] = []
    command = [str(python), str(file)]
    programs = make_programs(Agent(command=command), Rollout(), Workers(), failed.append)
    async with playing(model, programs, [CALL, "3<eos>"]) as (writer, dispatcher, server, _):
        prompt = prompt_of(server.codec)
        trajectory = writer.start(prompt, dispatcher.servers[server.url])
        await trajectory.until_ended()
        assert not failed, failed
        whole = trajectory.result()
        assert whole is not None and whole.environment_reward == 1.0
        played = Played(whole, prompt, server)
        played.check()
        (text,) = played.texts()
        assert text.endswith(f"a:[{CALL}]t:3;a:[3<eos>]")


async def test_an_environment_of_verifiers_is_an_agent(
    model: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers.v1")
    clients = str(repository / "tests/programs/clients")
    monkeypatch.syspath_prepend(clients)
    monkeypatch.setenv("PYTHONPATH", clients)
    options = {"taskset": {"id": "adder-taskset"}, "agent": {"runtime": {"type": "subprocess"}}}
    write_prompts(options, tmp_path / "prompts.jsonl")
    row = json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[1])
    failed: list[CallFailed] = []
    agent = Agent(function="verifiers", options=options)
    programs = make_programs(agent, Rollout(), Workers(), failed.append)
    async with playing(model, programs, ["2<eos>"]) as (writer, dispatcher, server, _):
        prompt = replace(prompt_of(server.codec), columns=row)
        trajectory = writer.start(prompt, dispatcher.servers[server.url])
        await trajectory.until_ended()
        assert not failed, failed
        whole = trajectory.result()
        assert whole is not None and whole.environment_reward == 1.0
        played = Played(whole, prompt, server)
        played.check()
        assert played.texts() == ["u:1+1;a:[2<eos>]"]
