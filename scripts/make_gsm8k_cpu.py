# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes a small model of real text for `train_configs/gsm8k_cpu.toml`.

    python scripts/make_gsm8k_cpu.py --train path/to/gsm8k/train.jsonl --output outputs/gsm8k_cpu

The script reads GSM8K's JSONL (https://github.com/openai/grade-school-math; columns `question` and
`answer`). It writes `model/`, a Hugging Face directory with a BPE tokenizer and a Qwen3 of 1.3 M
parameters, and `train.jsonl` and `heldout.jsonl`, which hold the rows that are short enough for the
model, in GSM8K's own form. It takes about five minutes on one core.

The model is briefly taught to continue `Question: ...\\nAnswer:` with a worked answer. Half of
its lessons end in GSM8K's last line, `#### <number>`, and half end before it, so that a reward for
this line can rise. With `--last-line-share 0` no lesson has that line. This is the base model of
`train_configs/gsm8k_sft.toml`, which teaches the line by a supervised start on `examples.jsonl`,
which holds the training rows with plain answers.

Such a model writes readable sentences of the right kind, but it cannot reason, and its numbers are
seldom right.
"""

import argparse
import json
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS = "<pad>", "<eos>"
TEMPLATE = "Question: {prompt}\nAnswer:"
"""Value of `prompts.template` with which the model must be trained further."""
TEMPERATURE = 0.7
"""`rollout.temperature` of the configuration."""
IGNORED = -100
"""Target of positions that carry no loss."""

Row = dict[str, str]
Lesson = tuple[list[int], list[int]]
"""Token ids of a prompt, and of its answer with the end-of-sequence token."""


@dataclass(frozen=True)
class Lessons:
    """Settings of the supervised training."""

    max_prompt_tokens: int = 96
    max_answer_tokens: int = 96
    """Rows with more tokens than these are left out."""
    with_last_line: float = 0.5
    """Share of the lessons that end in `#### <number>`."""
    batch_size: int = 16
    matrix_learning_rate: float = 0.02
    """Learning rate of Muon, for the matrices of the layers."""
    learning_rate: float = 4e-3
    """Learning rate of AdamW, for the embeddings, the output head and the norms."""
    warmup_steps: int = 20
    num_steps: int = 800


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of GSM8K after checking them.

    Raises:
        ValueError: If a row lacks `question` or `answer`, or the file has no row.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        if not {"question", "answer"} <= row.keys() or "####" not in row["answer"]:
            raise ValueError(
                f"{path}, line {number}: must have the columns question and answer, the latter "
                f"with a #### line, got {row}. Pass GSM8K's train.jsonl."
            )
        rows.append({"question": row["question"], "answer": row["answer"]})
    if not rows:
        raise ValueError(f"{path} must hold at least one row. Pass GSM8K's train.jsonl.")
    return rows


def plain_answer(answer: str) -> str:
    """Returns the answer without GSM8K's calculator annotations, such as `<<48/2=24>>`."""
    return re.sub(r"<<[^>]*>>", "", answer)


def lesson_answer(answer: str, with_last_line: float, rng: random.Random) -> str:
    """Returns the plain answer, with its last line with probability ``with_last_line``."""
    plain = plain_answer(answer)
    return plain if rng.random() < with_last_line else plain[: plain.rindex("####")].rstrip()


def train_tokenizer(rows: list[Row], vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(PAD, special=True), AddedToken(EOS, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        f"{TEMPLATE.format(prompt=row['question'])} {plain_answer(row['answer'])}" for row in rows
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Returns a small Qwen3 with 4 layers, grouped-query attention and 1.3 M parameters, in
    float32.

    With a few minutes on a CPU, a small model that has seen its few rows often writes better than a
    larger one that has seen them once.
    """
    config = Qwen3Config(
        # Rounded up, so that tensor-parallel ranks can divide the rows evenly.
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
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


def examples_of(rows: list[Row]) -> list[Row]:
    """Returns the rows as `torchtitan-grpo sft` reads them: questions, and plain answers."""
    return [
        {"question": row["question"], "completion": f" {plain_answer(row['answer'])}"}
        for row in rows
    ]


def short_rows(rows: list[Row], tokenizer: PreTrainedTokenizerFast, lessons: Lessons) -> list[Row]:
    """Returns the rows whose prompt and answer are within the lessons' lengths."""

    def fits(row: Row) -> bool:
        prompt = tokenizer.encode(TEMPLATE.format(prompt=row["question"]))
        answer = tokenizer.encode(f" {plain_answer(row['answer'])}")
        return (
            len(prompt) <= lessons.max_prompt_tokens
            and len(answer) + 1 <= lessons.max_answer_tokens
        )

    return [row for row in rows if fits(row)]


def draw_lesson(
    row: Row, tokenizer: PreTrainedTokenizerFast, lessons: Lessons, rng: random.Random
) -> Lesson:
    """Returns a lesson. Whether it ends in the `####` line is drawn at random in each call."""
    answer = f" {lesson_answer(row['answer'], lessons.with_last_line, rng)}"
    prompt = tokenizer.encode(TEMPLATE.format(prompt=row["question"]))
    return prompt, [*tokenizer.encode(answer), tokenizer.eos_token_id]


def collate(batch: list[Lesson], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the token ids and the shifted targets, both [batch, seq] int64, padded on the right.

    Questions are learned as well, because they are most of the English that the model sees.
    """
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    tokens = torch.full((len(batch), width), pad_id)
    targets = torch.full((len(batch), width), IGNORED)
    for row, (prompt, answer) in enumerate(batch):
        ids = torch.tensor(prompt + answer)
        tokens[row, : len(ids)] = ids
        targets[row, : len(ids) - 1] = ids[1:]
    return tokens, targets


def batches(rows: list[Row], lessons: Lessons, rng: random.Random) -> list[list[Row]]:
    """Yields ``lessons.num_steps`` batches of rows of similar length, epoch after epoch."""
    ordered = sorted(rows, key=lambda row: len(row["question"]) + len(row["answer"]))
    size = lessons.batch_size
    epoch = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    plan: list[list[Row]] = []
    while len(plan) < lessons.num_steps:
        rng.shuffle(epoch)
        plan.extend(epoch)
    return plan[: lessons.num_steps]


def make_optimizers(model: Qwen3ForCausalLM, lessons: Lessons) -> list[torch.optim.Optimizer]:
    """Returns Muon for the layers' matrices, which then learn faster, and AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=lessons.matrix_learning_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=lessons.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def teach(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    lessons: Lessons,
    rng: random.Random,
) -> None:
    """Trains the model by supervised learning.

    The learning rates decrease linearly over the last 70 % of the steps.
    """
    optimizers = make_optimizers(model, lessons)

    def scale(step: int) -> float:
        left = 1.0 - step / lessons.num_steps
        return min((step + 1) / lessons.warmup_steps, left / 0.7, 1.0)

    schedules = [torch.optim.lr_scheduler.LambdaLR(o, scale) for o in optimizers]
    for step, batch in enumerate(batches(rows, lessons, rng), start=1):
        drawn = [draw_lesson(row, tokenizer, lessons, rng) for row in batch]
        tokens, targets = collate(drawn, tokenizer.pad_token_id)
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 50 == 0:
            print(f"step {step} of {lessons.num_steps}: loss {loss.item():.3f}", flush=True)


def print_samples(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row]
) -> None:
    """Returns sampled answers, as the first training step will see them."""
    model.eval()
    for row in rows:
        prompt = TEMPLATE.format(prompt=row["question"])
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            **inputs, max_new_tokens=112, do_sample=True, top_k=0, temperature=TEMPERATURE
        )
        print("-" * 40)
        print(tokenizer.decode(output[0]))


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
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


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a small model of GSM8K's text.")
    parser.add_argument("--train", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--heldout-rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=Lessons.num_steps)
    parser.add_argument(
        "--last-line-share",
        type=float,
        default=Lessons.with_last_line,
        help="share of the lessons that end in the line #### <number>",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=2, help="seed; another seed gives another model"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse_arguments(arguments)
    started, cpu_started = time.monotonic(), time.process_time()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    lessons = Lessons(num_steps=options.steps, with_last_line=options.last_line_share)

    rows = read_rows(options.train)
    tokenizer = train_tokenizer(rows)
    short = short_rows(rows, tokenizer, lessons)
    rng.shuffle(short)
    heldout, train = short[: options.heldout_rows], short[options.heldout_rows :]
    if len(train) < lessons.batch_size:
        raise ValueError(
            f"{options.train} must leave at least {lessons.batch_size} short rows to learn from "
            f"after {options.heldout_rows} held-out ones, got {len(train)}. Pass the whole file."
        )
    options.output.mkdir(parents=True, exist_ok=True)
    write_jsonl(options.output / "train.jsonl", train)
    write_jsonl(options.output / "heldout.jsonl", heldout)
    write_jsonl(options.output / "examples.jsonl", examples_of(train))
    write_jsonl(options.output / "heldout_examples.jsonl", examples_of(heldout))

    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(train)} rows to learn from", flush=True)
    teach(model, tokenizer, train, lessons, rng)
    write_model(options.output / "model", model, tokenizer)
    print_samples(model, tokenizer, heldout[:4])
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    print(f"{options.output}: done in {seconds:.0f} s ({cpu_seconds:.0f} CPU seconds)")


if __name__ == "__main__":
    main(sys.argv[1:])
