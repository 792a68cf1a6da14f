# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Episodes under a chat template that leaves out the thinking of earlier turns."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rollouts import generation
from stub_clients import StubClient

from torchtitan.grpo import config as tables
from torchtitan.grpo.data.rows import sequences_of
from torchtitan.grpo.rollout.agents.writer import EpisodeWriter
from torchtitan.grpo.rollout.chat_template import LeftOut
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments.program import Environments
from torchtitan.grpo.rollout.scoring import read_ids
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import GenerateRequest, Generation, Prompt, Rollout

EOS = 1
# What stands in braces is thinking.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:"
    "{% if m.role == 'assistant' %}{{ m.content.split('}')[-1] }}<eos>"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ENVIRONMENT = """
from torchtitan.grpo.rollout.environments import Observation

class Counting:
    def __init__(self, **options):
        self.number = 0

    async def reset(self, prompt):
        self.words = prompt.columns.get("words", "")

    async def step(self, text, token_ids):
        self.number += 1
        if self.number == 3:
            return Observation(is_done=True, reward=1.0)
        if self.words and self.number == 1:
            return Observation(text=self.words)
        return Observation(messages=[{"role": "user", "content": f"[{self.number}]"}])

    async def close(self):
        pass
"""
TURNS = ["{12}3<eos>", "4<eos>", "{5}6<eos>"]


class Server(StubClient):
    """Writes the turns one after another, and keeps the contexts that it was sent."""

    def __init__(self, codec: TextCodec, turns: list[str]) -> None:
        self.url = "http://a"
        self.codec, self.turns = codec, [codec.encode(turn) for turn in turns]
        self.seen: list[tuple[list[int], list[int]]] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        turn = self.turns[len(self.seen)]
        self.seen.append((list(request.prompt_ids), turn))
        return generation(turn, -np.arange(1, len(turn) + 1))

    @property
    def contexts(self) -> list[str]:
        return [self.codec.decode_exactly(context) for context, _ in self.seen]


@pytest.fixture
def codec(repository: Path, tmp_path: Path) -> TextCodec:
    model = tmp_path / "model"
    shutil.copytree(repository / "assets/reverse_digits/model", model)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return TextCodec(str(model), [EOS])


async def play(
    codec: TextCodec,
    tmp_path: Path,
    turns: list[str] = TURNS,
    *,
    templated: bool = True,
    max_total: int = 200,
    max_new: int = 100,
    begun: Generation | None = None,
    **columns: Any,
) -> tuple[Generation, Server, dict[str, float]]:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    settings = tables.Rollout(
        environment=f"{tmp_path / 'mine.py'}:Counting",
        request_timeout_seconds=30,
        max_turns=8,
        earlier_turns="as_templated" if templated else "as_written",
    )
    config: Any = SimpleNamespace(
        rollout=settings, agent=tables.Agent(), workers=tables.Workers(), vocab_size=128
    )
    environments, server = Environments(config, DropLog()), Server(codec, turns)
    dispatcher = Dispatcher([server], settings, vocab_size=128)
    dispatcher.set_version(server.url, 0)
    messages = [{"role": "user", "content": "7"}]
    prompt = Prompt(0, messages, np.array(codec.encode_chat(messages), np.int32), columns)
    try:
        await environments.start()
        sampling = Sampling(max_new, max_total, 1.0, 1.0, -1, (EOS,))
        writer = EpisodeWriter(dispatcher, sampling, config, codec, environments)
        whole = await writer.start(prompt, dispatcher.servers[server.url], begun=begun).task
        return whole, server, writer.metrics()
    finally:
        await environments.close()


def rollout(codec: TextCodec, whole: Generation) -> Rollout:
    prompt = np.array(codec.encode("u:7;a:"), np.int32)
    return Rollout(**vars(whole), prompt_ids=prompt, completion="", reward=1.0)


async def test_a_turn_behind_a_rewritten_context_begins_a_row_and_others_do_not(codec, tmp_path):
    whole, server, metrics = await play(codec, tmp_path)
    assert server.contexts == [
        "u:7;a:",
        "u:7;a:3<eos>u:[1];a:",
        "u:7;a:3<eos>u:[1];a:4<eos>u:[2];a:",
    ]
    assert metrics["environment/rewritten_contexts"] == 1
    rows = sequences_of(rollout(codec, whole))
    texts = [
        (codec.decode_exactly(r.prompt_ids), codec.decode_exactly(r.completion_ids)) for r in rows
    ]
    assert texts == [
        ("u:7;a:", "{12}3<eos>"),
        ("u:7;a:3<eos>u:[1];a:", "4<eos>u:[2];a:{5}6<eos>"),
    ]
    assert [row.part for row in rows] == [0, 1]
    # The reward functions get each turn once.
    assert codec.decode_exactly(read_ids(whole)) == "{12}3<eos>4<eos>u:[2];a:{5}6<eos>"


async def test_every_trained_token_stands_behind_what_the_server_saw(codec, tmp_path):
    whole, server, _ = await play(codec, tmp_path)
    trained = set()
    for row in sequences_of(rollout(codec, whole)):
        ids = [*row.prompt_ids.tolist(), *row.completion_ids.tolist()]
        is_trained = (
            row.sampled if row.sampled is not None else np.ones(len(row.completion_ids), bool)
        )
        for i in np.flatnonzero(is_trained):
            position = len(row.prompt_ids) + int(i)
            trained.add((tuple(ids[:position]), ids[position], float(row.generator_logprobs[i])))
    served = {
        ((*context, *turn[:i]), turn[i], -float(i + 1))
        for context, turn in server.seen
        for i in range(len(turn))
    }
    assert trained == served


async def test_as_written_or_without_thinking_nothing_is_rewritten(codec, tmp_path):
    whole, server, metrics = await play(codec, tmp_path, templated=False)
    assert server.contexts[2] == "u:7;a:{12}3<eos>u:[1];a:4<eos>u:[2];a:"
    assert (whole.new_rows, metrics["environment/rewritten_contexts"]) == ((), 0)
    turns = ["3<eos>", "4<eos>", "6<eos>"]
    templated, _, metrics = await play(codec, tmp_path, turns)
    written, _, _ = await play(codec, tmp_path, turns, templated=False)
    assert (templated.new_rows, metrics["environment/rewritten_contexts"]) == ((), 0)
    assert templated.token_ids.tolist() == written.token_ids.tolist()


async def test_text_that_is_put_behind_a_turn_belongs_to_the_same_message(codec, tmp_path):
    turns = ["{1}2<eos>", "{3}4<eos>", "5<eos>"]
    _, server, _ = await play(codec, tmp_path, turns, words="(ok)")
    assert server.contexts == [
        "u:7;a:",
        "u:7;a:{1}2<eos>(ok)",
        "u:7;a:4<eos>u:[2];a:",
    ]


async def test_each_row_has_room_of_its_own_and_contexts_do_not_count_as_written(codec, tmp_path):
    # The first row takes 6 + 6 tokens and the second 17 + 10, so both fit into 27.
    whole, _, _ = await play(codec, tmp_path, max_total=34, max_new=40)
    assert whole.finish_reason == "stop"
    longest = max(row.num_tokens for row in sequences_of(rollout(codec, whole)))
    assert longest <= 34 < 6 + len(whole.token_ids)
    # No row may be longer: here the second context does not fit any more.
    cut, server, metrics = await play(codec, tmp_path, max_total=16, max_new=40)
    assert (cut.finish_reason, len(server.seen)) == ("length", 1)
    assert (cut.new_rows, metrics["environment/rewritten_contexts"]) == ((), 0)


async def test_an_episode_that_goes_on_after_a_resume_has_the_same_rows(codec, tmp_path):
    whole, _, _ = await play(codec, tmp_path)
    turn = len(codec.encode(TURNS[0]))
    begun = generation(whole.token_ids[:turn], whole.logprobs[:turn])
    again, server, _ = await play(codec, tmp_path, TURNS[1:], begun=begun)
    assert server.contexts[0] == "u:7;a:3<eos>u:[1];a:"
    assert again.token_ids.tolist() == whole.token_ids.tolist()
    assert again.new_rows == whole.new_rows


@pytest.mark.parametrize("templated", [True, False])
async def test_a_reply_that_the_template_leaves_out_ends_the_run(codec, tmp_path, templated):
    file = tmp_path / "model/tokenizer_config.json"
    spoken = TEMPLATE.replace("in messages", "in messages[:2]")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": spoken}))
    codec = TextCodec(str(tmp_path / "model"), [EOS])
    with pytest.raises(LeftOut, match="is said by the role 'user' in message 3 of 3"):
        await play(codec, tmp_path, templated=templated)
