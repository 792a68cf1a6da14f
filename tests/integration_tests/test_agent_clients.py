# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Real clients, unchanged and in processes of their own, and the rows that their requests lead to."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from agent_world import (
    EOS,
    ROW_LEN,
    Played,
    answers_in,
    make_model,
    playing,
    prompt_of,
    rollout_of,
    writing,
)
from proxy import RecordingProxy

from torchtitan.grpo.config import Agent, Rollout, Workers
from torchtitan.grpo.data.rows import sequences_of
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.kinds import make_client
from torchtitan.grpo.inference.local_servers import LaunchedServer
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.rollout.agents.programs import Programs, make_programs
from torchtitan.grpo.rollout.agents.verifiers import write_prompts
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Generation, Prompt
from torchtitan.grpo.workers.owner import CallFailed

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><eos>'
CLIENTS = ["sync_client", "async_client", "lite", "agents_sdk", "graph"]


@pytest.fixture(scope="module")
def model(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(repository, tmp_path_factory.mktemp("agents"))


# In the short suite, the other clients only meet the real server of the next test.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ("sync_client", "agents_sdk") else pytest.mark.long)
        for n in CLIENTS
    ],
)
async def test_an_episode_of_a_client_is_one_row(model: Path, repository: Path, name: str) -> None:
    failed: list[CallFailed] = []
    programs = programs_of(name, repository, failed)
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


@pytest.mark.parametrize("name", CLIENTS)
async def test_rows_hold_what_went_over_the_wire_to_a_real_server(
    model: Path, repository: Path, serve: Callable[..., LaunchedServer], name: str
) -> None:
    """A proxy between the run and the server keeps it: token for token, logprob for logprob."""
    failed: list[CallFailed] = []
    programs = programs_of(name, repository, failed)
    launched = serve(max_model_len=ROW_LEN)
    async with RecordingProxy(launched.url) as proxy:
        client = make_client("embedded", proxy.url)
        try:
            await wait_until_up([client], [launched], timeout_seconds=240)
            await serve_version_0(proxy.url)
            whole, prompt = await played_to_its_end(model, programs, client)
        finally:
            await client.close()
    assert not failed, failed
    rollout = rollout_of(whole, prompt)
    assert answers_in(rollout) == sorted(proxy.seen)
    # The Agents SDK ends with the first answer that was cut.
    assert len(proxy.seen) == 2 or name == "agents_sdk"
    assert len(sequences_of(rollout)) == 1, "what a client sends back is recognized"


async def played_to_its_end(
    model: Path, programs: Programs, client: InferenceClient
) -> tuple[Generation, Prompt]:
    async with writing(model, programs, client, max_new_tokens=30) as (writer, dispatcher):
        prompt = prompt_of(TextCodec(str(model), [EOS]))
        trajectory = writer.start(prompt, dispatcher.servers[client.url])
        return await trajectory.task, prompt


async def serve_version_0(url: str) -> None:
    """As the run's first push does: answers of an unpushed server are not trained."""
    body = {"new_version": "0", "abort_all_requests": False}
    route = f"{url}/update_weight_version"
    async with aiohttp.ClientSession() as session, session.post(route, json=body) as answer:
        assert answer.status == 200, await answer.text()


def programs_of(name: str, repository: Path, failed: list[CallFailed]) -> Programs:
    python = repository / ".venv-clients/bin/python"
    command = [str(python), str(repository / f"tests/programs/clients/{name}.py")]
    return make_programs(Agent(command=command), Rollout(), Workers(), failed.append)


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
