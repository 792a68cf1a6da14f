# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Small models, rollouts and settings of runs for `replayed_runs.py`, and what such runs write."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from torchtitan.grpo.types import Rollout, VersionSegment

VOCAB_SIZE, EOS = 61, 2
COMMON: dict[str, Any] = {
    "training.local_batch_size": 1,
    "training.mixed_precision_param": "float32",
    "optimizer.implementation": "foreach",
    "activation_checkpoint.mode": "none",
    "observe.progress": "none",
    "observe.log_level": "warning",
    "debug.seed": 0,
}


def small_model(tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, head_dim=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        max_position_embeddings=64, tie_word_embeddings=tied, eos_token_id=EOS,
        initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"[{i}]": i for i in range(VOCAB_SIZE)}, unk_token="[0]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"[{EOS}]")
    fast.save_pretrained(folder)


def hf_weights(model: Any, tied: bool) -> dict[str, torch.Tensor]:
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if tied:
        del weights["lm_head.weight"]
    return weights


def assert_same_weights(found: dict, expected: dict, label: str) -> None:
    assert found.keys() == expected.keys(), label
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, (label, name)
        where = f"{label}, {name}"
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-4, msg=where)


def rollout(
    prompt: np.ndarray, completion: np.ndarray, logprobs: np.ndarray, version: int, reward: float
) -> Rollout:
    segments = (VersionSegment(version, 0, len(completion)),)
    return Rollout(
        prompt_ids=prompt, token_ids=completion, logprobs=logprobs.astype(np.float32),
        segments=segments, finish_reason="stop", completion="", reward=reward,
    )  # fmt: skip


def case(name: str, settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Returns a run for the program; keys of ``more`` have ``__`` for the dot."""
    settings = COMMON | settings | {key.replace("__", "."): value for key, value in more.items()}
    return {"name": name, "arguments": [_argument(k, v) for k, v in settings.items()]}


def layout_case(world: Any, name: str, degrees: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns the world's run under a layout; a pipeline's microbatches are one row each."""
    more |= {f"parallelism__{key}": value for key, value in degrees.items()}
    if "pipeline_parallel_degree" in degrees:
        more["training__local_batch_size"] = 2
    return world.case(name, **more)


def _argument(key: str, value: Any) -> str:
    if value is True:
        return f"--{key}"
    table, _, name = key.partition(".")
    return f"--{table}.no-{name}" if value is False else f"--{key}={value}"


def records(dump: Path, file: str = "metrics.jsonl") -> list[dict[str, float]]:
    return [json.loads(line) for line in (dump / file).read_text().splitlines()]


def events_of_steps(versions: range, updates: int = 1, saved=(), skipped=()) -> list[str]:
    events = [f"publish {versions.start - 1} from slot 0"]
    for slot, version in enumerate(versions, start=1):
        optimizer = [] if version in skipped else ["optimizer"]
        events += ["fence", *optimizer] * updates
        events += ["scheduler", f"publish {version} from slot {slot}"]
        if version in saved:
            events.append(f"save {version}")
    return events


PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}

JOBS = """
import torch

def writes(context):
    torch.manual_seed(context.step)
    with open(context.dump_folder / f"rank-{context.rank}.txt", "a") as file, torch.no_grad():
        for _ in range(50):
            print(context.step, context.pipeline_rank, context.num_pipeline_ranks, file=file)
            yield

def fails(context):
    yield
    raise RuntimeError("nothing to score")

def has_no_work(context):
    yield from ()
"""


def assert_jobs_were_run(dump: Path, num_steps: int) -> None:
    """Checks a run on two ranks with all three of ``JOBS``, in 16 training passes."""
    metrics = records(dump)
    lines = [(dump / f"rank-{rank}.txt").read_text().split() for rank in (0, 1)]
    for rank, words in enumerate(lines):
        assert set(words[1::3]) == {str(rank)} and set(words[2::3]) == {"2"}
        assert set(words[::3]) <= {str(step + 1) for step in range(num_steps)}
    total = {key: sum(record[key] for record in metrics) for key in metrics[0] if "fill_" in key}
    # Each rank may also run units before the passes 1, 2, 4, 8 and 16.
    num_tries = sum(len(words) // 3 for words in lines) - total["pipeline/fill_units"]
    assert total["pipeline/fill_units"] > 0 and 2 * (2 + 4) <= num_tries <= 2 * (2 + 4 + 3)
    # On a busy machine, units take longer than the simulated gaps.
    assert total["pipeline/fill_seconds"] > 0 and total["pipeline/fill_usable_seconds"] > 0
    assert total["pipeline/fill_late_seconds"] > 0
    assert [record["pipeline/fill_lost_jobs"] for record in metrics] == [2.0] * num_steps
