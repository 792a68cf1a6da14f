# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes a tiny model that half-knows how to use a calculator, for `train_configs/calculator.toml`.

    python scripts/make_calculator_task.py --output outputs/calculator

The script writes `train.jsonl` and `heldout.jsonl` (columns `prompt`, such as `47*8+13->`, and
`answer`) and `model/`, with the architecture and tokenizer of `make_tiny_model.py`. It takes less
than a minute on one core.

The model is taught to repeat the prompt's expression, followed by an equals sign, and to end its
turn after the calculator's answer. Some digits in its training examples are wrong, and training
ends as soon as about one sample in six is right. The model is never taught to calculate: tokens
between `=` and the end carry no loss.

With `--reversals assets/reverse_digits/train.jsonl` the model is also taught to reverse the digits
of these prompts, for `train_configs/two_environments.toml`.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from make_tiny_model import (
    IGNORED,
    SEPARATOR,
    build_model,
    build_tokenizer,
    write_jsonl,
    write_model,
)
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from torchtitan.grpo.rollout.environments.calculator import calculate


@dataclass(frozen=True)
class Lessons:
    """Settings of the supervised training."""

    wrong_digits: float = 0.2
    """Fraction of the digits in the examples that are replaced by random ones, in [0, 1)."""
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    check_interval: int = 5
    """Number of steps between two measurements of the model."""
    stop_at: float = 0.16
    """Training ends when samples are entirely right with this probability."""
    max_steps: int = 1500


def draw_expressions(rng: random.Random, count: int) -> list[str]:
    """Returns distinct expressions of three numbers with one or two digits each."""
    found: dict[str, None] = {}
    while len(found) < count:
        numbers = [str(rng.randint(1, 99)) for _ in range(3)]
        operators = rng.choices("+-*", k=2)
        found[numbers[0] + operators[0] + numbers[1] + operators[1] + numbers[2]] = None
    return list(found)


def row(expression: str) -> dict[str, str]:
    return {"prompt": expression + SEPARATOR, "answer": str(calculate(expression))}


def spoil(expression: str, wrong_digits: float, rng: random.Random) -> str:
    """Returns the expression with about ``wrong_digits`` of its digits replaced by random ones."""
    return "".join(
        rng.choice("123456789") if c.isdigit() and rng.random() < wrong_digits else c
        for c in expression
    )


Example = tuple[str, str, str]
"""A prompt, what the model is taught to write, and what the calculator adds before the end."""


def calculation(asked: str, written: str) -> Example:
    return asked + SEPARATOR, written + "=", str(calculate(written))


def reversal(digits: str, written: str) -> Example:
    return digits + SEPARATOR, written, ""


def collate(
    tokenizer: PreTrainedTokenizerFast, texts: list[Example]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the token ids and the shifted targets, both [batch, seq] int64."""
    width = max(sum(map(len, parts)) for parts in texts) + 1
    tokens = torch.full((len(texts), width), tokenizer.pad_token_id)
    targets = torch.full((len(texts), width), IGNORED)
    for i, (prompt, call, result) in enumerate(texts):
        ids = [*tokenizer.encode(prompt + call + result), tokenizer.eos_token_id]
        tokens[i, : len(ids)] = torch.tensor(ids)
        start, end = len(prompt), len(prompt) + len(call)
        targets[i, start - 1 : end - 1] = tokens[i, start:end]
        targets[i, len(ids) - 2] = tokenizer.eos_token_id
    return tokens, targets


@torch.no_grad()
def probability_of_right(
    model: Qwen3ForCausalLM, tokens: torch.Tensor, targets: torch.Tensor
) -> float:
    """Returns the mean probability that a sample is entirely right, given the calculator's tokens."""
    logits = model(input_ids=tokens).logits
    losses = F.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    )
    return losses.sum(-1).neg().exp().mean().item()


def teach(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    expressions: list[str],
    reversed_digits: list[str],
    lessons: Lessons,
    rng: random.Random,
) -> None:
    """Trains the model by supervised learning until it half-knows each task.

    Raises:
        RuntimeError: If the model does not half-know a task after ``lessons.max_steps``.
    """
    probes = [[calculation(e, e) for e in draw_expressions(rng, 256)]]
    probes += [[reversal(d, d[::-1]) for d in reversed_digits[:256]]] if reversed_digits else []
    tensors = [collate(tokenizer, probe) for probe in probes]
    num_reversals = lessons.batch_size if reversed_digits else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=lessons.learning_rate, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / lessons.warmup_steps)
    )
    score = 0.0
    for step in range(1, lessons.max_steps + 1):
        batch = rng.sample(expressions, lessons.batch_size)
        examples = [calculation(e, spoil(e, lessons.wrong_digits, rng)) for e in batch]
        examples += [
            reversal(d, spoil(d[::-1], lessons.wrong_digits, rng))
            for d in rng.sample(reversed_digits, num_reversals)
        ]
        tokens, targets = collate(tokenizer, examples)
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % lessons.check_interval == 0:
            score = min(probability_of_right(model, *probe) for probe in tensors)
            if score >= lessons.stop_at:
                print(f"step {step}: samples are right with probability {score:.3f}", flush=True)
                return
    raise RuntimeError(
        f"Samples must be right with probability {lessons.stop_at} within {lessons.max_steps} "
        f"steps, got {score:.3f}. Give it more steps or fewer wrong digits."
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Make the calculator's tiny model and task.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-rows", type=int, default=4096)
    parser.add_argument("--heldout-rows", type=int, default=256)
    parser.add_argument("--reversals", type=Path, help="prompts whose digits to reverse as well")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    # With one thread, sums have the same order on machines with any number of cores.
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)

    expressions = draw_expressions(rng, options.train_rows + options.heldout_rows)
    train, heldout = expressions[: options.train_rows], expressions[options.train_rows :]
    options.output.mkdir(parents=True, exist_ok=True)
    write_jsonl(options.output / "train.jsonl", [row(e) for e in train])
    write_jsonl(options.output / "heldout.jsonl", [row(e) for e in heldout])

    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    digits: list[str] = []
    if options.reversals is not None:
        rows = map(json.loads, options.reversals.read_text().splitlines())
        digits = [row["prompt"].removesuffix(SEPARATOR) for row in rows]
    teach(model, tokenizer, train, digits, Lessons(), rng)
    write_model(options.output / "model", model, tokenizer)
    print(f"{options.output}: done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
