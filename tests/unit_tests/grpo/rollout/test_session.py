# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import json
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from prompt_files import process_config
from rollouts import generation
from stub_clients import serving

from torchtitan.grpo import config as tables
from torchtitan.grpo.rollout.saved import SavedRollouts, UnfinishedGroup, write_saved
from torchtitan.grpo.rollout.session import RolloutSession
from torchtitan.grpo.types import PromptProgress


def config_of(
    repository: Path, prompts: Path, url: str, file: Path, *functions: str
) -> tables.RolloutProcessConfig:
    return process_config(
        repository / "assets/reverse_digits/model",
        tables.Prompts(path=str(prompts), shuffle=False),
        inference=tables.Inference(kind="embedded", launch=False, urls=[url]),
        reward=tables.Reward(functions=["exact_match", *functions]),
        vocab_size=128,
        eos_token_ids=[1],
        dump_folder=str(prompts.parent),
        start_version=1,
        num_steps=20,
        progress=PromptProgress(3, (2,)),  # the checkpoint's, which is older
        saved_rollouts=str(file),
    )


def saved_rollouts(logprob: float) -> SavedRollouts:
    """Prompts 3 and 5 were drawn after the checkpoint's last batch, and 3 was closed since."""
    part = generation([100], logprob)
    return SavedRollouts(
        version=1,
        progress=PromptProgress(6, (2, 4, 5)),
        closed={3: "failed"},
        unfinished=(UnfinishedGroup(2, 0, (part,)), UnfinishedGroup(4, 1, (), (part,))),
    )


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "a flipped bit": (flip_a_bit, "its checksum is not that"),
    "an impossible logprob": (
        lambda file: write_saved(file, saved_rollouts(-200.0)),
        "in group 2, its logprobs must be finite, above -87.337 and not above 0, got -200.0",
    ),
    "prompts of another run": (
        lambda file: write_saved(file, replace(saved_rollouts(-0.5), closed={})),
        "the prompts in it are not those that were open at the checkpoint",
    ),
    "no file": (lambda file: file.unlink(), "No such file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rollouts_are_told_by_name_and_their_prompts_are_issued_again(
    repository: Path, tmp_path: Path, damage: str
):
    file, (do_damage, reason) = tmp_path / "step-1.msgpack", DAMAGE[damage]
    write_saved(file, saved_rollouts(-0.5))
    do_damage(file)
    told: list[str] = []
    config = config_of(repository, tmp_path / "prompts.jsonl", "http://127.0.0.1:1", file)
    session = RolloutSession(config, told.append)
    (message,) = told
    assert message.startswith(
        f"The rollouts kept beside the checkpoint of step 1 ({file}) are damaged and are not used: "
    )
    assert reason in message and message.endswith("Their prompts are issued again.")
    assert session._saved is None
    assert session._config.progress == config.progress, "the checkpoint's, which the ledger follows"


async def test_a_resumed_session_holds_what_was_saved_and_goes_on_from_there(
    repository: Path, tmp_path: Path
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p, "answer": p}) + "\n" for p in "123456789"))
    saved, file = saved_rollouts(-0.5), tmp_path / "step-1.msgpack"
    write_saved(file, saved)

    told = {"embedded": True, "model_path": "", "data": [{}], "tp_size": 1, "vocab_size": 128}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(told)

    progress = tmp_path / "progress.py"
    progress.write_text(
        "def progress(completions, trainer_state):\n"
        "    share = trainer_state.global_step / trainer_state.max_steps\n"
        "    return [share] * len(completions)\n"
    )
    async with serving(answer) as url:
        config = config_of(repository, prompts, url, file, f"{progress}:progress")
        session = RolloutSession(config)
        try:
            await session.open()
            held = session.producer.save(1)
            assert (held.version, held.progress, held.closed) == (1, saved.progress, saved.closed)
            assert [g.group_id for g in held.unfinished] == [2, 4]
            drawn = [await session.producer._next_prompt() for _ in range(2)]
            # The open prompt of which nothing was saved comes first, and then a new one.
            assert [prompt.group_id for prompt in drawn] == [5, 6]
            pool = session.inputs.pool
            assert pool is not None and session.inputs.environments[""].rewards == [[0.0, 1 / 20]]
            assert (await pool.score(drawn[0], [""], [[]])).values == [[0.0], [1 / 20]]
        finally:
            await session.close()
