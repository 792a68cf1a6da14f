# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes `assets/reverse_digits`: a tiny model that half-knows how to reverse digits.

    python scripts/make_tiny_model.py

The script writes `train.jsonl` and `heldout.jsonl` (columns `prompt` and `answer`, no row in
common) and `model/`, a Hugging Face directory of less than 4 MB with a Qwen3 with untied embeddings
and a tokenizer with one token for each printable ASCII character. It takes about half a minute on
one core. The same seed on the same machine gives the same bytes.

GRPO can only reinforce what the model already writes now and then, so the model is first taught the
task by supervised learning, with two handicaps. A share of the digits in its lessons is wrong,
which keeps its samples uncertain, and the lessons end as soon as its most likely answers are right
about half of the time. The data for GRPO and the held-out answers are all correct.
"""

import argparse
import hashlib
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
SEPARATOR = "->"
IGNORED = -100
"""Target of positions that carry no loss."""


@dataclass(frozen=True)
class Lessons:
    """Settings of the supervised training."""

    min_digits: int = 4
    max_digits: int = 7
    wrong_digits: float = 0.48
    """Share of the answers' digits that the lessons replace by random ones, in [0, 1)."""
    batch_size: int = 128
    learning_rate: float = 1.5e-3
    warmup_steps: int = 20
    check_interval: int = 5
    """Number of steps between two checks of the greedy answers."""
    stop_at: float = 0.45
    """The lessons end when this share of the greedy answers is entirely right."""
    max_steps: int = 1500


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the printable ASCII characters, `<pad>`, `<eos>` and `<unk>`."""
    characters = [chr(code) for code in range(ord(" "), ord("~") + 1)]
    vocab = {token: index for index, token in enumerate([PAD, EOS, UNK, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    # Every character is a token of its own. The newline becomes <unk>.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (PAD, EOS, UNK)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Returns a small Qwen3: 4 layers, grouped-query attention, 0.47 M parameters, float32."""
    config = Qwen3Config(
        # More than the tokenizer's 98 tokens, so that tensor-parallel ranks can divide the rows
        # evenly.
        vocab_size=128,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    # Known before, it would zero this token's row of the embedding. When the token is sampled, each
    # norm of such a row multiplies the gradient by 1/sqrt(epsilon).
    config.pad_token_id = tokenizer.pad_token_id
    return model


def draw_rows(rng: random.Random, num_rows: int, lessons: Lessons) -> list[dict[str, str]]:
    """Returns distinct rows. Every number of digits is equally likely."""
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < num_rows:
        length = rng.randint(lessons.min_digits, lessons.max_digits)
        digits = "".join(rng.choices("0123456789", k=length))
        rows[digits] = {"prompt": digits + SEPARATOR, "answer": digits[::-1]}
    return list(rows.values())


def spoil(answer: str, wrong_digits: float, rng: random.Random) -> str:
    """Returns the answer with about ``wrong_digits`` of its digits replaced by random ones."""
    return "".join(rng.choice("0123456789") if rng.random() < wrong_digits else d for d in answer)


def collate(
    tokenizer: PreTrainedTokenizerFast, rows: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the token ids and the targets of (prompt, answer) pairs, both [batch, seq] int64.

    Rows are padded on the right, which a causal model cannot see. Targets are already shifted. They
    are :data:`IGNORED` except where the answer or its end must be written.
    """
    encoded = [
        (tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_token_id])
        for prompt, answer in rows
    ]
    width = max(len(prompt) + len(answer) for prompt, answer in encoded)
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
    targets = torch.full((len(rows), width), IGNORED)
    for row, (prompt, answer) in enumerate(encoded):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    return tokens, targets


@torch.no_grad()
def greedy_exact_match(
    model: Qwen3ForCausalLM, tokens: torch.Tensor, targets: torch.Tensor
) -> float:
    """Returns the share of rows that greedy decoding answers entirely right.

    One forward pass is enough: greedy decoding writes the whole answer exactly if each of its
    tokens is the most likely one after the right tokens before it.
    """
    best = model(input_ids=tokens).logits.argmax(-1)
    right = (best == targets) | (targets == IGNORED)
    return right.all(-1).float().mean().item()


def teach(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train: list[dict[str, str]],
    lessons: Lessons,
    rng: random.Random,
) -> None:
    """Trains the model by supervised learning until it half-knows the task.

    Raises:
        RuntimeError: If the model does not half-know the task after ``lessons.max_steps``.
    """
    probe = collate(tokenizer, [(r["prompt"], r["answer"]) for r in draw_rows(rng, 512, lessons)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lessons.learning_rate, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / lessons.warmup_steps)
    )
    for step in range(1, lessons.max_steps + 1):
        batch = rng.sample(train, lessons.batch_size)
        tokens, targets = collate(
            tokenizer,
            [(r["prompt"], spoil(r["answer"], lessons.wrong_digits, rng)) for r in batch],
        )
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % lessons.check_interval == 0:
            score = greedy_exact_match(model, *probe)
            print(
                f"step {step}: loss {loss.item():.3f}, greedy exact match {score:.3f}", flush=True
            )
            if score >= lessons.stop_at:
                return
    raise RuntimeError(
        f"The greedy exact match must reach {lessons.stop_at} within {lessons.max_steps} steps, "
        f"got {score:.3f}. Give it more steps or fewer wrong digits."
    )


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes the Hugging Face directory, and prints the weights' hash, to compare two runs."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers before version 5 knows this class name as well.
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {num_bytes / 1e6:.2f} MB, sha256 of model.safetensors {digest}")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    assets = Path(__file__).resolve().parent.parent / "assets" / "reverse_digits"
    parser = argparse.ArgumentParser(description="Make the tiny model and its task.")
    parser.add_argument("--output", type=Path, default=assets, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-rows", type=int, default=4096)
    parser.add_argument("--heldout-rows", type=int, default=256)
    parser.add_argument("--wrong-digits", type=float, default=Lessons.wrong_digits)
    parser.add_argument("--stop-at", type=float, default=Lessons.stop_at)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse_arguments(arguments)
    started = time.monotonic()
    # With one thread, sums have the same order on machines with any number of cores.
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    lessons = Lessons(wrong_digits=options.wrong_digits, stop_at=options.stop_at)

    rows = draw_rows(rng, options.train_rows + options.heldout_rows, lessons)
    train, heldout = rows[: options.train_rows], rows[options.train_rows :]
    options.output.mkdir(parents=True, exist_ok=True)
    write_jsonl(options.output / "train.jsonl", train)
    write_jsonl(options.output / "heldout.jsonl", heldout)

    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    teach(model, tokenizer, train, lessons, rng)
    write_model(options.output / "model", model, tokenizer)

    score = greedy_exact_match(
        model, *collate(tokenizer, [(r["prompt"], r["answer"]) for r in heldout])
    )
    print(f"held-out greedy exact match {score:.3f}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
