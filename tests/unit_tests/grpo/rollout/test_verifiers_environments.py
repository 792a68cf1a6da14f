# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Environments of the verifiers package, where it is installed; what is said where it is not."""

import contextlib
import importlib.util
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.config import Rollout
from torchtitan.grpo.rollout.environments import EnvironmentFailed, EnvironmentPool
from torchtitan.grpo.rollout.environments.environment_pool import (
    EnvironmentsFailing,
    RemoteEnvironment,
)
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt

HAS_VERIFIERS = all(map(importlib.util.find_spec, ("verifiers", "verifiers.envs")))
needs_verifiers = pytest.mark.skipif(not HAS_VERIFIERS, reason="verifiers < 0.4 is not installed")

GUESSING = '''
import verifiers as vf
from datasets import Dataset

class Guessing(vf.MultiTurnEnv):
    """The model guesses a number; it is told where to look, and is done when it has it."""

    async def setup_state(self, state):
        state["low"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        guess, answer = int(messages[-1].content), int(state["answer"])
        if guess == answer:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return []
        return [{"role": "user", "content": "higher" if guess < answer else "lower"}]

def load_environment(top=9):
    rows = [{"prompt": [{"role": "user", "content": f"0 to {top}?"}], "answer": str(a)} for a in (3, 7)]
    async def won(completion, answer):
        last = [m for m in completion if m.role == "assistant"][-1]
        return float(last.content == answer)
    async def number_of_turns(state):
        return len(state["trajectory"])
    rubric = vf.Rubric(funcs=[won, number_of_turns], weights=[1.0, 0.0])
    return Guessing(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=4)
'''

TOOLS = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

def load_environment():
    rows = [{"prompt": [{"role": "user", "content": "2+3?"}], "answer": "5"}]
    async def right(completion, answer):
        return float(answer in completion[-1].content)
    return vf.ToolEnv(tools=[add], dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
'''

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch):
    """Opens the environment of a prompt, once it has begun."""
    (tmp_path / "guessing.py").write_text(GUESSING)
    (tmp_path / "tools.py").write_text(TOOLS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    asked = {"guessing": ("0 to 9?", "7"), "tools": ("2+3?", "5")}

    @contextlib.asynccontextmanager
    async def open_(env_id: str, **changes: Any) -> AsyncIterator[RemoteEnvironment]:
        options = {"env_id": env_id}
        pool = EnvironmentPool(Rollout(environment="verifiers", environment_options=options))
        try:
            await pool.start()
            text, answer = asked[env_id]
            messages = [{"role": "user", "content": text}]
            prompt = Prompt(0, messages, np.zeros(1, np.int32), {"answer": answer})
            yield await pool.open(replace(prompt, **changes))
        finally:
            await pool.close()

    return open_


@needs_verifiers
async def test_it_answers_and_rewards_and_ends_by_its_own_rules_and_when_it_is_cut_off(opened):
    async with opened("guessing") as remote:
        first = await remote.step("4", [0])
        assert (first.messages, first.is_done) == ([{"role": "user", "content": "higher"}], False)
        last = await remote.step("7", [0])
        assert (last.is_done, last.reward) == (True, 1.0)
    async with opened("guessing") as remote:
        for _ in range(3):
            assert not (await remote.step("4", [0])).is_done
        last = await remote.step("4", [0])
        assert (last.is_done, last.reward) == (True, 0.0)
    async with opened("guessing") as remote:
        assert not (await remote.step("4", [0])).is_done
        assert await remote.cut_off() == 0.0
    async with opened("guessing") as remote:
        with pytest.raises(EnvironmentFailed, match="ValueError"):
            await remote.step("no number", [0])
    with pytest.raises(EnvironmentFailed, match="needs prompts that are chat messages"):
        async with opened("guessing", text="0 to 9?"):
            pass


@needs_verifiers
async def test_tools_are_called_as_models_write_their_calls(opened):
    async with opened("tools") as remote:
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
        answer = await remote.step(call, [0])
        assert answer.messages == [{"role": "tool", "tool_call_id": "call_1", "content": "5"}]
        last = await remote.step("It is 5.", [0])
        assert (last.is_done, last.reward) == (True, 1.0)


@needs_verifiers
def test_its_data_set_is_written_as_prompts(opened, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    from torchtitan.grpo.rollout.environments.verifiers import write_prompts

    assert write_prompts("guessing", tmp_path / "prompts.jsonl", top=20) == 2
    first = json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[0])
    assert first["prompt"] == [{"role": "user", "content": "0 to 20?"}]
    assert first["answer"] == "3"


@pytest.mark.skipif(HAS_VERIFIERS, reason="verifiers < 0.4 is installed")
async def test_without_the_package_the_run_says_what_to_install(opened):
    with pytest.raises(EnvironmentsFailing, match=r'pip install "verifiers<0\.4"'):
        async with opened("guessing"):
            pytest.fail("it has begun")


def test_messages_are_written_behind_a_turn_as_the_chat_template_would(repository, tmp_path):
    shutil.copytree(repository / "assets/reverse_digits/model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    codec = TextCodec(str(tmp_path / "model"), [1])
    prompt = [{"role": "user", "content": "Hi"}]
    reply = [{"role": "tool", "content": "12"}, {"role": "user", "content": "And?"}]
    opened = codec.encode_chat(prompt)
    turn = [*codec.encode("Yes"), 1]
    whole = codec.encode_chat([*prompt, {"role": "assistant", "content": "Yes"}, *reply])
    assert opened + turn + codec.encode_continuation(codec.reply_text(reply, turn)) == whole
    # Where the model did not write the end of its turn, the template does.
    cut = codec.encode("Yes")
    assert opened + cut + codec.encode_continuation(codec.reply_text(reply, cut)) == whole
