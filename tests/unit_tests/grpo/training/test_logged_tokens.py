# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``samples.jsonl`` has the trainer's ratio of each trained token, in every kind of layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_settings
import torch
from replay_settings import PIPELINE, VOCAB_SIZE, layout_case

from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.data.rows import sequences_of
from torchtitan.grpo.types import PromptProgress, Rollout, RolloutGroup

NUM_GROUPS, NUM_LOGGED = 4, 3


class World:
    """A model, and a batch with untrained tokens, rollouts of two rows, and a group of equal rewards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = replay_settings.small_model(tied=False)
        replay_settings.save(model, folder / "model")
        random, self.groups = np.random.default_rng(1), []
        self.expected: dict[tuple[int, int], np.ndarray] = {}
        for index in range(NUM_GROUPS):
            prompt = random.integers(3, VOCAB_SIZE, 3).astype(np.int32)
            rollouts = [random_rollout(random, prompt, i) for i in range(3)]
            exact = [trainer_logprobs(model, rollout) for rollout in rollouts]
            if index == 0:  # as servers in step with the trainer would compute them
                rollouts = [
                    replace(r, logprobs=np.nan_to_num(x).astype(np.float32))
                    for r, x in zip(rollouts, exact, strict=True)
                ]
            if index == 1:
                rollouts = [replace(rollout, reward=0.5) for rollout in rollouts]
            for i, (rollout, logprobs) in enumerate(zip(rollouts, exact, strict=True)):
                self.expected[index, i] = np.exp(logprobs - rollout.logprobs)
            self.groups.append(RolloutGroup(index, "", tuple(rollouts), ""))
        recorder = RolloutRecorder(str(folder / "record"), VOCAB_SIZE, 1.0, 0)
        recorder.write(0, PromptProgress(NUM_GROUPS), self.groups)
        recorder.close()

    def case(self, name: str, **more: Any) -> dict[str, Any]:
        settings = {
            "job.dump_folder": self.folder / name, "model.hf_assets_path": self.folder / "model",
            "training.steps": 1, "training.seq_len": 40, "optimizer.lr": 1e-2,
            "rollout.replay": self.folder / "record", "rollout.max_new_tokens": 32,
            "grpo.prompts_per_step": NUM_GROUPS, "grpo.group_size": 3,
            "observe.samples_per_step": NUM_LOGGED,
        }  # fmt: skip
        return replay_settings.case(name, settings, more)

    def check(self, name: str, *, is_filtered: bool = False) -> None:
        records: list[dict[str, Any]] = replay_settings.records(self.folder / name, "samples.jsonl")
        assert len(records) == 3 * NUM_LOGGED
        for place, record in enumerate(records):
            index, i = divmod(place, 3)
            rollout, tokens = self.groups[index].rollouts[i], record["tokens"]
            where, size = f"{name}, group {index}, rollout {i}", len(rollout.token_ids)
            assert record["group_id"] == index, where
            sampled = np.ones(size, bool) if rollout.sampled is None else rollout.sampled
            assert_close(tokens["logprob"], np.where(sampled, rollout.logprobs, np.nan), where)
            assert len(tokens["text"]) == size, where
            if index == 1 and is_filtered:
                assert tokens["trained"] == [0] * size, where
                assert "ratio" not in tokens and "advantage" not in tokens, where
                continue
            assert tokens["trained"] == sampled.astype(int).tolist(), where
            assert_close(tokens["ratio"], self.expected[index, i], where)
            advantages = np.where(sampled, record["advantage"], np.nan)
            assert_close(tokens["advantage"], advantages, where)
            if index == 0:
                assert {x for x in tokens["ratio"] if x is not None} == {1.0}, where


def assert_close(found: list[float | None], expected: np.ndarray, where: str) -> None:
    numbers = np.array(found, np.float64)  # NaN for null
    np.testing.assert_allclose(numbers, expected, rtol=1e-4, atol=6e-5, err_msg=where)


def random_rollout(random: np.random.Generator, prompt: np.ndarray, member: int) -> Rollout:
    size = int(random.integers(6, 12))
    completion = random.integers(3, VOCAB_SIZE, size).astype(np.int32)
    logprobs = -random.uniform(3, 5, size)
    found = replay_settings.rollout(prompt, completion, logprobs, 0, float(random.uniform()))
    if member == 0:
        return found
    sampled = np.ones(size, np.bool_)
    sampled[2:4] = False  # an agent's tokens, which may begin another row
    new_rows = ((2, 2),) if member == 2 else ()
    logprobs = np.where(sampled, found.logprobs, 0).astype(np.float32)
    return replace(found, sampled=sampled, logprobs=logprobs, new_rows=new_rows)


@torch.no_grad()
def trainer_logprobs(model: Any, rollout: Rollout) -> np.ndarray:
    """The logprobs of all tokens, NaN where not trained, one row at a time."""
    found = []
    for row in sequences_of(rollout):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.completion_ids])).long()
        logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        if row.part > 0:
            found.append(np.full(len(row.prompt_ids), np.nan))
        own = logprobs[len(row.prompt_ids) - 1 :].double().numpy()
        found.append(own if row.sampled is None else np.where(row.sampled, own, np.nan))
    return np.concatenate(found)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("logged"))


def test_a_process_writes_what_plain_torch_computes(world, run_ranks):
    cases = [
        world.case("whole"),
        world.case("parts", rollout__stream=True, rollout__stream_parts=2),
        world.case("updates", grpo__num_minibatches=2, grpo__num_epochs=2),
        world.case("filtered", grpo__filter_zero_advantage=True),
        world.case("alone", prompts__share_contexts=False, prompts__balance_batch=False),
        world.case("none", observe__samples_per_step=0),
        world.case("refused", guards__mismatch_kl="stop"),
    ]
    (results,) = run_ranks("replayed_runs", 1, folder=str(world.folder), cases=cases)
    for name in ("whole", "parts", "updates", "filtered", "alone"):
        world.check(name, is_filtered=name == "filtered")
    assert not (world.folder / "none/samples.jsonl").exists()
    # A step that a guard refuses has its samples, without what ranks would have told of it.
    assert results["refused"]["error"]
    refused: list[dict[str, Any]] = replay_settings.records(
        world.folder / "refused", "samples.jsonl"
    )
    assert len(refused) == 3 * NUM_LOGGED
    assert all("ratio" not in record["tokens"] for record in refused)


def test_two_ranks_write_what_plain_torch_computes_in_every_layout(world, run_ranks):
    layouts = {
        "fsdp": {"data_parallel_shard_degree": 2}, "tensor": {"tensor_parallel_degree": 2},
        "context": {"context_parallel_degree": 2}, "pipeline": PIPELINE,
    }  # fmt: skip
    cases = [layout_case(world, name, degrees) for name, degrees in layouts.items()]
    run_ranks("replayed_runs", 2, folder=str(world.folder), cases=cases)
    for name in layouts:
        world.check(name)
