# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From ``[prompts]`` to a stream, with the tables, the tokenizer and the session's own code."""

import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_files import process_config

from torchtitan.grpo.config import Evaluation, Prompts, Reward
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.inputs import open_held_out, open_prompts
from torchtitan.grpo.rollout.prompts import open_sets
from torchtitan.grpo.rollout.session import RolloutSession
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import PromptProgress


@pytest.fixture
def model(repository: Path) -> Path:
    return repository / "assets/reverse_digits/model"


@pytest.fixture
def codec(model: Path) -> TextCodec:
    return TextCodec(str(model), [])


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    lines, table = tmp_path / "lines.jsonl", tmp_path / "table.parquet"
    lines.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(4)))
    rows = [{"prompt": f"{i}", "answer": "1"} for i in range(10, 22)]
    pq.write_table(pa.Table.from_pylist(rows), table, row_group_size=5)
    return [str(lines), str(table)]


def num_open(paths: list[str]) -> int:
    """How often this process has one of the files open."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(link))
        except FileNotFoundError:  # that of the listing itself
            continue
    return sum(link in paths for link in links)


def test_files_of_different_kinds_are_mixed_and_reopened_where_they_stopped(model, codec, paths):
    prompts = Prompts(paths=paths, weights=[3, 1])
    stream, examples = open_prompts(process_config(model, prompts), codec, [])
    # The rewards are tried on each set, whose columns differ.
    samples = [of_set[0] for of_set in examples]
    assert [set(prompt.columns) for prompt in samples] == [{"prompt_set"}, {"prompt_set", "answer"}]
    drawn = [stream.next() for _ in range(40)]
    sets = Counter(prompt.columns["prompt_set"] for prompt in drawn)
    assert sets == {"lines": 30, "table": 10}
    assert all(("answer" in p.columns) == (p.columns["prompt_set"] == "table") for p in drawn)
    stream.close()

    config = process_config(model, prompts, progress=PromptProgress(position=30))
    resumed, _ = open_prompts(config, codec, [3, 17, 29])
    again = [resumed.next() for _ in range(13)]
    expected = [drawn[i] for i in (3, 17, 29, *range(30, 40))]
    assert [(p.group_id, p.text) for p in again] == [(p.group_id, p.text) for p in expected]
    resumed.close()
    assert num_open(paths) == 0


def test_missing_set_is_named_and_the_others_are_closed(model, codec, paths):
    prompts = Prompts(paths=[*paths, "/no/such.jsonl"])
    with pytest.raises(ValueError, match=r"prompts.paths: /no/such.jsonl cannot be read"):
        open_sets(process_config(model, prompts), codec)
    prompts = Prompts(paths=paths, max_prompt_tokens=1)
    with pytest.raises(ValueError, match=r"prompts.paths: none of the 12 prompts in .*table.parq"):
        open_prompts(process_config(model, prompts), codec, [])
    held_out = Evaluation(path=paths[0], num_prompts=3)
    config = process_config(model, Prompts(path=paths[1]), evaluation=held_out)
    (opened,) = open_held_out(config, codec, DropLog()).values()
    assert [prompt.text for prompt in opened] == ["0", "1", "2"]
    assert num_open(paths) == 0
    stream, (examples,) = open_prompts(config, codec, [])
    assert set(examples[0].columns) == set(stream.next().columns) == {"answer"}
    stream.close()


async def test_answers_that_earn_nothing_are_reported_at_the_start_of_a_run(model, tmp_path):
    train, held_out = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    train.write_text('{"prompt": "6*7?", "answer": "42"}\n{"prompt": "6*8?", "answer": " "}\n')
    held_out.write_text('{"prompt": "6*9?", "answer": "It must be 54"}\n')
    config = process_config(
        model,
        Prompts(path=str(train)),
        reward=Reward(functions=["partial_match", "boxed_math"], timeout_seconds=60.0),
        evaluation=Evaluation(path=str(held_out), function="exact_match"),
    )

    session = RolloutSession(config)
    try:
        await session.open_inputs()
        of_train, _, of_held_out = session.inputs.warnings
    finally:
        await session.close()
    assert of_train.startswith("prompts.path: partial_match cannot be earned in 1 of the first 2")
    assert f"is empty in 1 of them (for example in {train}:2)" in of_train
    assert of_held_out.startswith("evaluation.path: exact_match cannot be earned in 1 of the first")
    reason = f"longer than rollout.max_new_tokens (8) in 1 of them (for example in {held_out}:1)"
    assert reason in of_held_out
