# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Real clients, unchanged and in processes of their own, and the rows that their requests lead to."""

import os
from pathlib import Path
from typing import Any

import pytest
from agent_world import Played, make_model, playing, prompt_of

from torchtitan.grpo.config import Agent, Rollout, Workers
from torchtitan.grpo.rollout.agents.programs import make_programs
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
