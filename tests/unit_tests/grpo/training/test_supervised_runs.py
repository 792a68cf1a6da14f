# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Supervised runs take the steps of transformers' own cross entropy, in each kind of layout."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_settings
import torch
from replay_settings import EOS, PIPELINE, VOCAB_SIZE, assert_same_weights, layout_case
from safetensors.torch import load_file

SEQ_LEN = 24
NUM_STEPS, NUM_EXAMPLES, PER_STEP, NUM_HELD_OUT = 4, 11, 5, 6
LR, EPS, MAX_NORM = 2e-2, 1e-2, 0.5

Example = tuple[list[int], list[int]]


@dataclass(frozen=True)
class World:
    """A model and examples of it, and what plain torch makes of them."""

    folder: Path
    weights: dict[bool, dict[str, torch.Tensor]]
    losses: dict[bool, list[float]]
    held_out: dict[bool, list[float]]

    def case(self, name: str, *, tied: bool = True, **more: Any) -> dict[str, Any]:
        settings = {
            "job.dump_folder": self.folder / "dump" / name,
            "model.hf_assets_path": self.folder / ("tied" if tied else "untied"),
            "sft.path": self.folder / "examples.jsonl",
            "sft.held_out_path": self.folder / "held_out.jsonl",
            "sft.examples_per_step": PER_STEP,
            "prompts.shuffle": False,
            "training.steps": NUM_STEPS, "training.seq_len": SEQ_LEN, "training.max_norm": MAX_NORM,
            "optimizer.lr": LR, "optimizer.eps": EPS, "optimizer.beta2": 0.95,
            "lr_scheduler.warmup_steps": 0,
        }  # fmt: skip
        return replay_settings.case(name, settings, more)

    def check(self, name: str, *, tied: bool = True, dump: str = "") -> None:
        """Compares metrics, held-out losses and exported weights of a run with the plain loop's."""
        folder = self.folder / "dump" / (dump or name)
        steps = replay_settings.records(folder)
        assert [s["loss/total"] for s in steps] == pytest.approx(self.losses[tied], rel=1e-4), name
        held_out = replay_settings.records(folder, "evaluations.jsonl")
        found = [held_out[0]["evaluation/loss"], held_out[-1]["evaluation/loss"]]
        assert found == pytest.approx(self.held_out[tied], rel=1e-4), name
        exported = load_file(self.folder / f"{name}.safetensors")
        assert_same_weights(exported, self.weights[tied], name)


def random_examples(num_examples: int, seed: int) -> list[Example]:
    random = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return random.integers(3, VOCAB_SIZE, random.integers(low, high)).tolist()

    return [(tokens(2, 6), tokens(2, 9)) for _ in range(num_examples)]


def write_examples(path: Path, examples: list[Example]) -> None:
    def text(ids: list[int]) -> str:
        return " ".join(f"[{i}]" for i in ids)

    rows = [{"prompt": text(prompt), "completion": text(answer)} for prompt, answer in examples]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def mean_cross_entropy(model: Any, examples: list[Example]) -> torch.Tensor:
    """Transformers' own loss of each example, with the prompt's labels ignored."""
    total, num_tokens = torch.zeros(()), 0
    for prompt, answer in examples:
        ids = torch.tensor([[*prompt, *answer, EOS]])
        labels = ids.clone()
        labels[0, : len(prompt)] = -100
        n = len(answer) + 1
        total, num_tokens = total + n * model(ids, labels=labels).loss, num_tokens + n
    return total / num_tokens


def train_plainly(
    model: Any, examples: list[Example], held_out: list[Example]
) -> tuple[list[float], list[float]]:
    """Returns the loss of each step, and the held-out losses before and after."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0
    )
    losses = []
    before = mean_cross_entropy(model, held_out).item()
    for step in range(NUM_STEPS):
        taken = [examples[(step * PER_STEP + i) % len(examples)] for i in range(PER_STEP)]
        optimizer.zero_grad()
        loss = mean_cross_entropy(model, taken)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses, [before, mean_cross_entropy(model, held_out).item()]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("supervised")
    examples = random_examples(NUM_EXAMPLES, 0)
    held_out = random_examples(NUM_HELD_OUT, 1)
    write_examples(folder / "examples.jsonl", examples)
    write_examples(folder / "held_out.jsonl", held_out)
    world = World(folder, {}, {}, {})
    for tied in (True, False):
        model = replay_settings.small_model(tied)
        replay_settings.save(model, folder / ("tied" if tied else "untied"))
        world.losses[tied], world.held_out[tied] = train_plainly(model, examples, held_out)
        world.weights[tied] = replay_settings.hf_weights(model, tied)
    return world


def test_one_process_takes_the_steps_of_transformers_cross_entropy(world, run_ranks):
    checkpointed: dict[str, Any] = {"checkpoint__enable": True, "checkpoint__interval": 2}
    cases = [
        world.case("plain"),
        world.case("stopped", **checkpointed),
        world.case(
            "resumed", **checkpointed, checkpoint__load_step=2,
            job__dump_folder=world.folder / "dump" / "stopped",
        ),
    ]  # fmt: skip
    (results,) = run_ranks("replayed_runs", 1, folder=str(world.folder), cases=cases)
    world.check("plain")
    world.check("resumed", dump="stopped")
    assert results["resumed"]["progress_at_start"] == [2 * PER_STEP, []]
    assert results["resumed"]["progress"] == [NUM_STEPS * PER_STEP, []]


def test_two_ranks_take_the_same_steps_in_every_kind_of_layout(world, run_ranks):
    layouts: dict[str, dict[str, Any]] = {
        "fsdp": {"data_parallel_shard_degree": 2},
        "replicas": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
        "tensor": {"tensor_parallel_degree": 2},
        "context": {"context_parallel_degree": 2},
        "pipeline": PIPELINE,
    }
    cases = [
        layout_case(world, name, degrees, tied=name != "pipeline")
        for name, degrees in layouts.items()
    ]
    run_ranks("replayed_runs", 2, folder=str(world.folder), cases=cases)
    for name in layouts:
        world.check(name, tied=name != "pipeline")
