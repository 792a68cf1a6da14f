# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Programs of agents as real processes: what they return, and how they end."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_world import make_model, playing, prompt_of

from torchtitan.grpo.config import Agent, Rollout, Workers
from torchtitan.grpo.rollout.agents.programs import make_programs
from torchtitan.grpo.rollout.environments import EnvironmentFailed, EnvironmentsFailing
from torchtitan.grpo.types import Generation
from torchtitan.grpo.workers.owner import CallFailed

ASK = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())
body = {"messages": [{"role": "user", "content": row["answer"]}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
text = answer["choices"][0]["message"]["content"]
"""
FUNCTION = """
import asyncio, os, sys, time
async def run(client, row):
    answer = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": row["answer"]}]
    )
"""
COMMANDS = {
    "reward": (ASK + "print('a line'); print(json.dumps({'reward': float(text == '12')}))", 1.0),
    "number": (ASK + "print(0.5)", 0.5),
    "text": (ASK + "print('done')", None),
    "much output": (ASK + "print('x' * 3_000_000); print(1)", 1.0),
    "output without end": (ASK + "os.execvp('yes', ['yes'])", "much output"),
    "opens its output": (
        ASK
        + """os.execvp('sh', ['sh', '-c', "echo line; echo 0.5 > /dev/stdout; echo '{\\"reward\\": 1}'"])""",
        1.0,
    ),
    "opens its output at the end": (
        ASK + "print(7, flush=True); os.system('echo 1 > /dev/stdout')",
        1.0,
    ),
    "no newline": (ASK + "sys.stdout.write('2')", 2.0),
    "raises": (ASK + "raise ValueError", "exit status 1"),
    "bad reward": (ASK + "print('{\"reward\": NaN}')", "bad reward"),
    "huge reward": (ASK + "print('9' * 400)", "bad reward"),
    "reward above the limit": (ASK + "print(1e13)", "bad reward"),
    "largest reward": (ASK + "print(-1e12)", -1e12),
    "its service is away": (ASK + "sys.exit(75)", "exit status 75"),
    "no request": ("print(1)", "no request"),
    "hangs": (ASK + "import time; time.sleep(600)", "timeout"),
    "closes its output": (ASK + "import time; os.close(1); time.sleep(600)", "timeout"),
    "kills itself": (ASK + "os.kill(os.getpid(), 9)", "exit status -9"),
    "too much memory": (ASK + "x = bytearray(3 * 2**30)", "exit status 1"),
    "child with too much memory": (
        ASK
        + "import subprocess; subprocess.run([sys.executable, '-c', 'bytearray(3 * 2**30)'], check=True)",
        "exit status 1",
    ),
    "forks": (ASK + "os.fork() or __import__('time').sleep(600); print(1)", 1.0),
}
FUNCTIONS = {
    "reward": ("    return {'reward': float(answer.choices[0].message.content == '12')}", 1.0),
    "nothing": ("    pass", None),
    "no time limit": ("    return float(client.timeout is None)", 1.0),
    "raises": ("    raise KeyError", "raised KeyError"),
    "no such file": ("    open('/no/such/file')", "raised FileNotFoundError"),
    "no service": (
        "    await asyncio.open_connection('127.0.0.1', 9)",
        "outside: ConnectionRefusedError",
    ),
    "a service behind it": (
        "    try: await asyncio.wait_for(asyncio.Event().wait(), 0.01)\n"
        "    except TimeoutError as error: raise RuntimeError('search failed') from error",
        "outside: RuntimeError",
    ),
    "full disk": ("    raise OSError(28, 'No space left on device')", "outside: OSError"),
    "bad reward": ("    return object()", "bad reward"),
    "reward above the limit": ("    return {'reward': -1e13}", "bad reward"),
    "text": ("    return 'done'", "bad reward"),
    "waits": ("    await asyncio.sleep(600)", "timeout"),
    "blocks": ("    time.sleep(600)", "timeout"),
    "ends": ("    os._exit(3)", "crash"),
    "exits": ("    await asyncio.create_task(asyncio.to_thread(sys.exit))", "crash"),
}


@pytest.fixture(scope="module")
def model(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(repository, tmp_path_factory.mktemp("agents"))


async def outcome(model: Path, agent: Agent, seconds: float) -> Generation | CallFailed:
    """What one episode comes to, and that nothing of it runs any more."""
    failed: list[CallFailed] = []
    workers = Workers(max_memory_gib=2)
    programs = make_programs(agent, Rollout(), workers, failed.append)
    async with playing(model, programs, ["12<eos>"], timeout_seconds=seconds) as world:
        writer, dispatcher, server, _ = world
        trajectory = writer.start(prompt_of(server.codec), dispatcher.servers[server.url])
        async with asyncio.timeout(100):
            await trajectory.until_ended()
        assert dispatcher.in_flight == 0
        found = trajectory.result() or failed[0]
    own = psutil.Process().children(recursive=True)
    assert not [p for p in own if "agent.py" in " ".join(p.cmdline())]
    # What a program has left behind is nobody's child.
    alike = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == agent.command]
    assert not agent.command or not psutil.wait_procs(alike, timeout=10)[1]
    return found


def check(found: Generation | CallFailed, expected: float | str | None) -> None:
    if isinstance(expected, str):
        assert isinstance(found, CallFailed)
        assert found.kind == expected
        assert isinstance(found, EnvironmentFailed)
        # The policy is the reason if its program has failed and nothing outside has.
        is_policys = expected.startswith(("exit status 1", "raised ", "bad reward"))
        assert (found.written is not None) == is_policys
        assert found.written is None or found.written.num_trained == 3
    else:
        assert isinstance(found, Generation), found
        assert found.environment_reward == expected
        assert found.num_trained == 3


@pytest.mark.parametrize("kind", COMMANDS)
async def test_commands(model: Path, tmp_path: Path, kind: str) -> None:
    source, expected = COMMANDS[kind]
    (tmp_path / "agent.py").write_text(source)
    agent = Agent(command=[sys.executable, str(tmp_path / "agent.py")])
    seconds = 3.0 if expected == "timeout" else 100.0
    check(await outcome(model, agent, seconds), expected)


@pytest.mark.parametrize("kind", FUNCTIONS)
async def test_functions(model: Path, tmp_path: Path, kind: str) -> None:
    source, expected = FUNCTIONS[kind]
    (tmp_path / "agent.py").write_text(FUNCTION + source)
    agent = Agent(function=f"{tmp_path}/agent.py:run")
    seconds = 3.0 if expected == "timeout" else 100.0
    check(await outcome(model, agent, seconds), expected)


async def test_an_episode_begins_again_if_another_one_blocks_its_worker(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    blocks = tmp_path / "blocks"
    block = f"    if row['blocks']: open({str(blocks)!r}, 'w').close(); deep(30)"
    (tmp_path / "agent.py").write_text(
        "def deep(n):\n    time.sleep(600) if n == 0 else deep(n - 1)\n"
        + FUNCTION.replace("):\n", f"):\n{block}\n", 1)
        + "    return 1.0"
    )
    agent = Agent(function=f"{tmp_path}/agent.py:run")
    programs = make_programs(agent, Rollout(), Workers(), lambda failure: None)
    async with playing(model, programs, ["12<eos>"]) as world, asyncio.timeout(300):
        writer, dispatcher, server, _ = world
        server.held = asyncio.Event()

        def start(blocks: bool) -> Any:
            prompt = prompt_of(server.codec)
            prompt.columns["blocks"] = blocks
            return writer.start(prompt, dispatcher.servers[server.url])

        innocent = start(False)
        await server.arrived.wait()
        guilty = start(True)
        printed = ""
        while "has blocked its event loop" not in printed:
            await asyncio.sleep(0.05)
            printed += capfd.readouterr().err
        assert blocks.exists() and "in run" in printed
        guilty.task.cancel()
        await asyncio.wait({guilty.task})
        server.held.set()
        await innocent.until_ended()
        whole = innocent.result()
        assert whole is not None and whole.num_trained == 3
        assert writer.metrics()["agent/begun_again"] == 1
        assert writer.metrics()["agent/requests"] == 1  # what has begun again is not counted


async def test_a_program_sees_no_key_of_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    monkeypatch.setenv("OTHER_TOKEN", "secret")
    (tmp_path / "agent.py").write_text(
        ASK
        + "print(float('OTHER_TOKEN' not in os.environ and os.environ['OPENAI_API_KEY'] != 'mine'))"
    )
    agent = Agent(command=[sys.executable, str(tmp_path / "agent.py")])
    check(await outcome(model, agent, 100.0), 1.0)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (Agent(function="nowhere.py:run"), "does not exist"),
        (Agent(function="os:getcwd"), "must be an async function"),
        (Agent(command=["no-such-program"]), "agent.command must begin with a program"),
    ],
)
async def test_what_cannot_be_loaded_is_refused(agent: Agent, message: str) -> None:
    programs = make_programs(agent, Rollout(), Workers(), lambda failure: None)
    try:
        with pytest.raises(EnvironmentsFailing, match=message):
            await programs.start()
    finally:
        await programs.close()


async def test_a_command_that_cannot_be_started_fails_its_episodes(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_bytes(b"\0")
    (tmp_path / "agent.py").chmod(0o700)
    found = await outcome(model, Agent(command=[f"{tmp_path}/agent.py"]), 100.0)
    assert isinstance(found, EnvironmentFailed)
    assert (found.kind, found.written) == ("exit status 1", None), "the policy has written nothing"
