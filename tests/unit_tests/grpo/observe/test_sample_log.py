# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Samples as the model saw them."""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchtitan.grpo.observe import sample_log
from torchtitan.grpo.observe.sample_log import SampleLog, group_texts, turns
from torchtitan.grpo.rollout.scoring import brief_columns
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Rollout, RolloutGroup, VersionSegment


@pytest.fixture(scope="module")
def codec(repository: Path) -> TextCodec:
    return TextCodec(str(repository / "assets/reverse_digits/model"), [1])


def rollout(codec: TextCodec, prompt: str, completion: str, sampled=None, **kwargs) -> Rollout:
    ids = np.array([*codec.encode_continuation(completion), 1], np.int32)
    segments = (VersionSegment(4, 0, 1), VersionSegment(5, 1, len(ids)))
    return Rollout(
        ids, np.zeros(len(ids), np.float32), "stop", segments,
        prompt_ids=np.array(codec.encode_continuation(prompt), np.int32),
        completion=completion, reward=0.5, reward_components={"exact_match": 1.0, "short": -0.5},
        logged={"verdict": "right"},
        sampled=None if sampled is None else np.array(sampled, np.bool_), **kwargs,
    )  # fmt: skip


def group(index: int, *rollouts: Rollout) -> RolloutGroup:
    columns = {"answer": "größer", "numbers": [1, 2]}
    row = f"train.jsonl:{index + 1}"
    return RolloutGroup(index, f"prompt {index}", rollouts, "http://s:1", columns, True, row=row)


def written_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_the_file_holds_whole_groups_with_all_that_was_scored(tmp_path, codec):
    log = SampleLog(tmp_path / "samples.jsonl", 2, 0, codec)
    both = rollout(codec, "12->", "21"), rollout(codec, "12->", "12")
    log.write(5, [group(i, *both) for i in range(4)], {0: [1.5, -1.5], 1: [None, None]})
    log.close()
    text = (tmp_path / "samples.jsonl").read_text()
    assert "größer" in text
    records = [json.loads(line) for line in text.splitlines()]
    assert [{k: v for k, v in r.items() if k != "tokens"} for r in records] == log.latest
    assert [r["group_id"] for r in records] == [0, 0, 1, 1]
    assert [r["row"] for r in records] == ["train.jsonl:1"] * 2 + ["train.jsonl:2"] * 2
    assert [r["prompt"] for r in records] == ["prompt 0"] * 2 + ["prompt 1"] * 2
    assert [r["completion"] for r in records] == ["21", "12"] * 2
    assert [r["advantage"] for r in records] == [1.5, -1.5, None, None]
    first = records[0]
    assert first["versions"] == [[4, 0, 1], [5, 1, 3]]
    assert first["reward_components"] == {"exact_match": 1.0, "short": -0.5}
    assert first["columns"] == {"answer": "größer", "numbers": [1, 2]}
    assert first["is_chat"] is True
    # With the end token, which the completion for reward functions lacks.
    assert first["completion"] == "21"
    assert [turn["text"] for turn in first["context"]] == ["12->", "21<eos>"]
    text, other = group_texts(records)
    assert text.startswith("step 5, prompt 0 (train.jsonl:1):") and "prompt 1 (" in other
    assert "completion 1 of 2: reward 0.5 (exact_match 1, short -0.5)" in text
    assert "advantage +1.5" in text and "advantage -1.5" in text
    assert "column answer: 'größer'" in text and "logged verdict: 'right'" in text
    assert "[model, 3 tokens, trained]\n    21<eos>" in text and "    12<eos>" in text
    assert text.count("12->") == text.count("column answer") == 1  # what all of them share


@pytest.mark.parametrize(
    ("reward", "cause", "shown"),
    [
        (None, "function", "no reward, unscored by function; left out;"),
        (None, "service", "no reward, unscored by service; left out;"),
        (None, "policy", "no reward, unscored by policy; left out;"),
        (0.5, "", "reward 0.5 (exact_match 1, short -0.5); left out;"),  # not accepted
    ],
)
def test_what_was_left_out_of_a_group_is_written_with_its_cause(
    tmp_path, codec, reward, cause, shown
):
    log = SampleLog(tmp_path / "samples.jsonl", 2, 0, codec)
    kept = replace(rollout(codec, "12->", "21"), unscored="policy")  # reward.unscorable_value
    lost = replace(rollout(codec, "12->", "2"), reward=reward, unscored=cause)
    groups = [replace(group(i, kept), left_out=(lost,)) for i in (30, 41, 42)]
    log.write(5, groups, {30: [1.5]})
    log.close()
    found = [(r["number"], r["completion"], r["reward"], r["left_out"]) for r in log.latest]
    assert found == [(1, "21", 0.5, False), (1, "2", reward, True)] + [
        (2, "21", 0.5, False), (2, "2", reward, True),
    ]  # fmt: skip
    assert [r["unscored"] for r in log.latest] == ["policy", cause] * 2
    assert [r["advantage"] for r in log.latest] == [1.5, None, None, None]
    assert log.latest[0]["group_rewards"] == [0.5, reward]
    text = next(group_texts(log.latest))
    assert "reward 0.5 (exact_match 1, short -0.5), unscored by policy; advantage +1.5" in text
    assert f"completion 2 of 2: {shown}" in text


def test_each_turn_says_who_wrote_it_and_whether_it_is_trained(codec):
    written = rollout(codec, "3*4->", "3*4=12", sampled=[1, 1, 1, 1, 0, 0, 1])
    assert turns(written, codec) == [
        {"role": "prompt", "trained": False, "num_tokens": 5, "text": "3*4->"},
        {"role": "model", "trained": True, "num_tokens": 4, "text": "3*4="},
        {"role": "environment", "trained": False, "num_tokens": 2, "text": "12"},
        {"role": "model", "trained": True, "num_tokens": 1, "text": "<eos>"},
    ]
    # Tokens of a policy that is too old are not the environment's.
    resumed = rollout(codec, "12->", "21", sampled=[0, 1, 1], num_context=1)
    assert [turn["role"] for turn in turns(resumed, codec)] == ["prompt", "older model", "model"]


def test_a_row_that_begins_anew_is_marked(codec):
    """An agent's own prompt stands in the place of the data's, which its model has not seen."""
    text, flags = "5:12->21,7:34->43", [0] * 6 + [1] * 2 + [0] * 7 + [1] * 3
    own = rollout(codec, "12->", text, sampled=flags, new_rows=((0, 6), (8, 7)))
    found = [(turn["role"], turn["text"], turn["trained"]) for turn in turns(own, codec)]
    assert found == [
        ("new row", "5:12->", False), ("model", "21", True),
        ("new row", ",7:34->", False), ("model", "43<eos>", True),
    ]  # fmt: skip
    # One that goes on behind the prompt, and is then shown something else.
    begun = rollout(codec, "12->", text, sampled=[0] * 6 + [1] * 12, new_rows=((8, 2),))
    assert [turn["role"] for turn in turns(begun, codec)] == [
        "prompt", "environment", "model", "new row", "model",
    ]  # fmt: skip
    empty = rollout(codec, "12->", "")
    assert [turn["role"] for turn in turns(empty, codec)] == ["prompt", "model"]


def test_the_prompt_is_printed_if_any_completion_began_with_it(tmp_path, codec):
    own = rollout(codec, "12->", "5:12->21", sampled=[0] * 6 + [1] * 3, new_rows=((0, 6),))
    log = SampleLog(tmp_path / "samples.jsonl", 2, 0, codec)
    log.write(5, [group(0, own, rollout(codec, "12->", "21")), group(1, own, own)], {})
    log.close()
    text, without = group_texts(log.latest)
    assert text.count("[prompt, 4 tokens, not trained]\n    12->") == 1
    assert text.index("[prompt") < text.index("completion 1 of 2")
    assert "[prompt" not in without and without.count("[new row") == 2


def test_each_token_has_its_values_and_null_where_it_was_not_sampled(tmp_path, codec):
    logprobs = -np.arange(7, dtype=np.float32) / 3
    written = rollout(codec, "3*4->", "3*4=12", sampled=[1, 1, 1, 1, 0, 0, 1])
    written = replace(written, logprobs=logprobs)
    whole = group(7, written, rollout(codec, "3*4->", "12"))
    lost = replace(group(8, written), left_out=(written,))
    values = np.array([[0.0, np.log(2), -np.log(3), np.nan, 1000.0], [1.5] * 4 + [-0.123456]])
    log = SampleLog(tmp_path / "samples.jsonl", 2, 0, codec)
    trained, told = {(7, 0), (7, 1)}, {(7, 0): values, (7, 1): values}  # too many for the second
    log.write(5, [whole, lost], {7: [None, -0.5], 8: [None]}, trained, told)
    log.close()
    first, second, *untrained = (record["tokens"] for record in written_in(tmp_path))
    sampled = [0.0, -0.3333, -0.6667, -1.0, None, None, -2.0]
    assert first == {
        "text": ["3", "*", "4", "=", "1", "2", "<eos>"],
        "logprob": sampled,
        "trained": [1, 1, 1, 1, 0, 0, 1],
        "ratio": [1.0, 2.0, 0.3333, None, None, None, None],
        "advantage": [1.5, 1.5, 1.5, 1.5, None, None, -0.1235],
    }
    # Nothing fits the second one, whose advantage rank 0 knows.
    assert second["advantage"] == [-0.5] * 3 and "ratio" not in second
    for tokens in untrained:
        assert tokens["trained"] == [0] * 7 and tokens["logprob"] == sampled
        assert tokens.keys() == {"text", "logprob", "trained"}
    assert "nonfinite_values" not in log.latest[0]


def test_lists_of_tokens_are_made_while_training_goes_on(tmp_path, codec, monkeypatch):
    may_go_on = threading.Event()

    def wait(self: TextCodec, token_ids: Sequence[int]) -> list[str]:
        assert may_go_on.wait(60)
        raise ValueError("these tokens have no text")

    monkeypatch.setattr(TextCodec, "pieces", wait)
    log = SampleLog(tmp_path / "samples.jsonl", 1, 0, codec)
    log.write(1, [group(0, rollout(codec, "12->", "21"))], {})
    assert [record["completion"] for record in log.latest] == ["21"]
    may_go_on.set()
    with pytest.raises(ValueError, match="no text"):  # an error is not lost
        log.write(2, [], {})
    log.close()


def test_tokens_of_long_completions_are_only_listed_for_the_first_ones(
    tmp_path, codec, monkeypatch
):
    monkeypatch.setattr(sample_log, "_MOST_TOKENS", 4)
    log = SampleLog(tmp_path / "samples.jsonl", 1, 0, codec)
    log.write(1, [group(0, *[rollout(codec, "12->", "21")] * 3)], {})  # each has 3 tokens
    log.close()
    assert ["tokens" in record for record in written_in(tmp_path)] == [True, True, False]


def test_long_columns_are_cut_and_unusual_ones_become_text():
    columns = {"test": "x" * 3000, "cases": [["y" * 3000]], "n": 3, "none": None, "odd": {1, 2}}
    brief = brief_columns(columns)
    assert brief["test"].endswith("... (1000 more characters)")
    assert isinstance(brief["cases"], str) and len(brief["cases"]) < 2100
    assert (brief["n"], brief["none"]) == (3, None)
    json.dumps(brief)
