# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Adapts environments of the `verifiers` package (https://github.com/PrimeIntellect-ai/verifiers).

    pip install "verifiers<0.4"
    python -m torchtitan.grpo.rollout.environments.verifiers my-env prompts.jsonl

    [rollout]
    environment = "verifiers"
    environment_options = { env_id = "my-env" }

The second line writes the environment's data set as a file for ``prompts.path``. Environments
of version 0.4 and later are agents, see `rollout/agents/verifiers.py`. A ``MultiTurnEnv`` asks a client for each turn. Here
its rollout waits in the client until the model has written the turn. Otherwise the environment
is unchanged, and its rubric gives the reward.

Environments that change earlier messages, or that reward whole groups, are refused. Tool calls
are parsed in the format that most open models write, ``<tool_call>{"name": ..., "arguments":
...}</tool_call>``. The prompts in ``prompts.path`` must describe the tools.
"""

import argparse
import asyncio
import functools
import json
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from torchtitan.grpo.rollout.agents.tool_calls import PARSERS
from torchtitan.grpo.rollout.environments.protocol import Environment, Observation
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.types import Prompt

_INSTALL = 'pip install "verifiers<0.4"'
_COLUMNS = ("answer", "info", "task", "example_id")
_T = TypeVar("_T")


class VerifiersEnvironment(Environment):
    """One rollout of an environment of the verifiers package, with the environment's arguments."""

    def __init__(self, env_id: str, **arguments: Any) -> None:
        self._home = _home(env_id, json.dumps(arguments, sort_keys=True, allow_nan=True))
        self._rollout: _Rollout | None = None

    async def reset(self, prompt: Prompt) -> None:
        if isinstance(prompt.text, str):
            raise ValueError(
                "An environment of verifiers needs prompts that are chat messages. Write the file "
                "of prompts.path with python -m torchtitan.grpo.rollout.environments.verifiers."
            )
        self._rollout = await self._home.run(_begin(self._home.environment, prompt))

    async def step(self, text: str, token_ids: list[int]) -> Observation:
        assert self._rollout is not None, "reset must be called before step"
        return await self._home.run(self._rollout.step(text))

    async def cut_off(self) -> float | None:
        assert self._rollout is not None, "reset must be called before cut_off"
        return await self._home.run(self._rollout.cut_off())

    async def close(self) -> None:
        if self._rollout is not None:
            await self._home.run(self._rollout.close())


class _Home:
    """An environment and the one event loop to which its locks and connections belong."""

    def __init__(self, env_id: str, arguments: dict[str, Any]) -> None:
        self.environment = _load(env_id, arguments)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True).start()

    async def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


@functools.cache
def _home(env_id: str, arguments: str) -> _Home:
    # The first call is the worker's check of the environment, before any episode has a thread.
    return _Home(env_id, json.loads(arguments))


def _load(env_id: str, arguments: dict[str, Any]) -> Any:
    try:
        package, _ = import_module("verifiers"), import_module("verifiers.clients")
        multi_turn = import_module("verifiers.envs.multiturn_env").MultiTurnEnv
    except ImportError as error:
        raise ValueError(
            f"rollout.environment = 'verifiers' needs the package verifiers with MultiTurnEnv: run "
            f"{_INSTALL} in the trainer's environment ({error})."
        ) from error
    environment = package.load_environment(env_id, **arguments)
    if not isinstance(environment, multi_turn):
        raise ValueError(
            f"rollout.environment_options.env_id = {env_id!r} must name a MultiTurnEnv, got a "
            f"{type(environment).__name__}."
        )
    if getattr(environment, "requires_group_rollouts", False):
        raise ValueError(
            f"rollout.environment_options.env_id = {env_id!r} must name an environment that rewards "
            "each rollout by itself, but this one rewards whole groups of rollouts. Choose another "
            "environment, and score groups with reward.functions."
        )
    return environment


class _Rollout:
    """A rollout that runs in a task and waits there for the model's turns."""

    def __init__(self, environment: Any, row: dict[str, Any]) -> None:
        # Messages of the conversation so far: the prompt, the turns and the observations.
        self._seen: list[tuple[str, Any]] = []
        self._asked: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._turns: asyncio.Queue[str | None] = asyncio.Queue()
        self._num_calls = 0
        client = _client_class()(self._answer)
        rollout = environment.run_rollout(row, client, "policy", {})
        self._task: asyncio.Task[dict[str, Any]] = asyncio.ensure_future(rollout)

    async def begin(self, messages: Sequence[dict[str, Any]]) -> None:
        asked = await self._next_question()
        given = [(m["role"], m["content"]) for m in messages]
        if asked is None or [_content(m) for m in asked] != given:
            raise ValueError(
                "The environment's first request must contain the prompt that the model is given. "
                "Write the file of prompts.path with "
                "python -m torchtitan.grpo.rollout.environments.verifiers. The request contains "
                f"{asked!r:.300}, and the prompt is {given!r:.300}."
            )
        self._seen = given

    async def step(self, text: str) -> Observation:
        self._turns.put_nowait(text)
        asked = await self._next_question()
        if asked is None:
            return Observation(is_done=True, reward=self._reward())
        num_seen = len(self._seen)
        is_kept = [_content(m) for m in asked[:num_seen]] == self._seen
        new = asked[num_seen + 1 :]
        if not (is_kept and new and asked[num_seen].role == "assistant"):
            raise ValueError(
                "The environment must append its messages to the model's turn and must not change "
                f"earlier messages. The conversation was {self._seen!r:.300}, and the environment "
                f"continued it as {asked!r:.300}."
            )
        self._seen = [_content(m) for m in asked]
        return Observation(messages=[m.model_dump(exclude_none=True) for m in new])

    async def cut_off(self) -> float | None:
        """Ends the rollout like a server at its length limit, and returns its reward."""
        self._turns.put_nowait(None)
        await self._task
        return self._reward()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _next_question(self) -> list[Any] | None:
        question = asyncio.ensure_future(self._asked.get())
        await asyncio.wait({question, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            return question.result()
        question.cancel()
        return None

    def _reward(self) -> float:
        output = self._task.result()
        if output.get("error") is not None:
            raise RuntimeError(f"The rollout ended with an error: {output['error']!r:.500}")
        return float(output["reward"])

    async def _answer(self, messages: list[Any]) -> Any:
        types = import_module("verifiers.types")
        self._asked.put_nowait(list(messages))
        text = await self._turns.get()
        if text is None:
            raise import_module("verifiers.errors").OverlongPromptError("there is no more room")
        message = types.ResponseMessage(
            content=text,
            tool_calls=self._tool_calls(text) or None,
            finish_reason="stop",
            is_truncated=False,
        )
        return types.Response(id="turn", created=int(time.time()), model="policy", message=message)

    def _tool_calls(self, text: str) -> list[Any]:
        tool_call, calls = import_module("verifiers.types").ToolCall, []
        for name, arguments, _ in PARSERS["Hermes"](text, []).calls:
            self._num_calls += 1
            calls.append(tool_call(id=f"call_{self._num_calls}", name=name, arguments=arguments))
        return calls


async def _begin(environment: Any, prompt: Prompt) -> _Rollout:
    assert not isinstance(prompt.text, str)
    row = {"prompt": prompt.text, "answer": "", "info": {}, "example_id": prompt.group_id}
    row |= {name: prompt.columns[name] for name in _COLUMNS if name in prompt.columns}
    rollout = _Rollout(environment, row)
    try:
        await rollout.begin(prompt.text)
    except BaseException:
        await rollout.close()
        raise
    return rollout


def _content(message: Any) -> tuple[str, Any]:
    return message.role, message.content


@functools.cache
def _client_class() -> Any:
    """A client class of verifiers that calls a function instead of a server."""
    client: Any = import_module("verifiers.clients").Client

    class Turns(client):
        async def get_response(self, prompt: list[Any], *_: Any, **__: Any) -> Any:
            return await self.client(prompt)

        async def _unused(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError("this client sends no requests")

        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError("this client needs no setup")

        to_native_tool = to_native_prompt = get_native_response = _unused
        raise_from_native_response = from_native_response = _unused

        async def close(self) -> None:
            pass

    return Turns


def write_prompts(env_id: str, path: Path, **arguments: Any) -> int:
    """Returns the number of rows."""
    rows: Iterable[dict[str, Any]] = _load(env_id, arguments).get_dataset()
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            kept = {name: row[name] for name in ("prompt", *_COLUMNS) if name in row}
            file.write(strict_json.dumps(kept) + "\n")
            count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description="Write an environment's data set as prompts.")
    parser.add_argument("env_id", help="name of the environment, for verifiers.load_environment")
    parser.add_argument("output", type=Path, help="JSONL file for prompts.path")
    parser.add_argument(
        "--arguments", type=json.loads, default={}, help="environment's arguments, as JSON"
    )
    options = parser.parse_args()
    count = write_prompts(options.env_id, options.output, **options.arguments)
    print(f"{options.output}: {count} prompts")


if __name__ == "__main__":
    main()
