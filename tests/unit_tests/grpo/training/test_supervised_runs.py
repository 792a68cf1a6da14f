# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Supervised runs take the steps of transformers' own cross entropy, in each kind of layout."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE, EOS, SEQ_LEN = 61, 2, 24
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
            "training.steps": NUM_STEPS,
            "training.seq_len": SEQ_LEN,
            "training.local_batch_size": 1,
            "training.max_norm": MAX_NORM,
            "training.mixed_precision_param": "float32",
            "optimizer.lr": LR,
            "optimizer.eps": EPS,
            "optimizer.beta2": 0.95,
            "optimizer.implementation": "foreach",
            "lr_scheduler.warmup_steps": 0,
            "activation_checkpoint.mode": "none",
            "observe.progress": "none",
            "observe.log_level": "warning",
            "debug.seed": 0,
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        return {"name": name, "arguments": [_argument(k, v) for k, v in settings.items()]}

    def records(self, name: str, file: str) -> list[dict[str, float]]:
        lines = (self.folder / "dump" / name / file).read_text().splitlines()
        return [json.loads(line) for line in lines]

    def check(self, name: str, *, tied: bool = True, dump: str = "") -> None:
        """Compares metrics, held-out losses and exported weights of a run with the plain loop's."""
        steps = self.records(dump or name, "metrics.jsonl")
        assert [s["loss/total"] for s in steps] == pytest.approx(self.losses[tied], rel=1e-4), name
        held_out = self.records(dump or name, "evaluations.jsonl")
        found = [held_out[0]["evaluation/loss"], held_out[-1]["evaluation/loss"]]
        assert found == pytest.approx(self.held_out[tied], rel=1e-4), name
        exported = load_file(self.folder / f"{name}.safetensors")
        assert exported.keys() == self.weights[tied].keys(), name
        for key, tensor in self.weights[tied].items():
            where = f"{name}, {key}"
            torch.testing.assert_close(exported[key], tensor, atol=2e-5, rtol=1e-4, msg=where)


def _argument(key: str, value: Any) -> str:
    if value is True:
        return f"--{key}"
    table, _, name = key.partition(".")
    return f"--{table}.no-{name}" if value is False else f"--{key}={value}"


def small_model(tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, head_dim=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        max_position_embeddings=64, tie_word_embeddings=tied, eos_token_id=EOS,
        initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({f"[{i}]": i for i in range(VOCAB_SIZE)}, unk_token="[0]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"[{EOS}]").save_pretrained(
        folder
    )


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
        model = small_model(tied)
        path = folder / ("tied" if tied else "untied")
        model.save_pretrained(path)
        save_tokenizer(path)
        world.losses[tied], world.held_out[tied] = train_plainly(model, examples, held_out)
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        if tied:
            del weights["lm_head.weight"]
        world.weights[tied] = weights
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
        "pipeline": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    }
    cases = []
    for name, settings in layouts.items():
        more: dict[str, Any] = {f"parallelism__{key}": value for key, value in settings.items()}
        if name == "pipeline":
            more["training__local_batch_size"] = 2  # microbatches of a row, one for each stage
        cases.append(world.case(name, tied=name != "pipeline", **more))
    run_ranks("replayed_runs", 2, folder=str(world.folder), cases=cases)
    for name in layouts:
        world.check(name, tied=name != "pipeline")
