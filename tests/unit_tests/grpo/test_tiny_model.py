# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The shipped model and task are what scripts/make_tiny_model.py promises."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchtitan.grpo.rewards.builtin import exact_match, partial_match

TASK = Path(__file__).resolve().parents[3] / "assets" / "reverse_digits"
MODEL = TASK / "model"


def read_rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (TASK / name).read_text(encoding="utf-8").splitlines()]


def complete(model, tokenizer, rows: list[dict[str, str]], **sampling) -> list[str]:
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    output = model.generate(**inputs, max_new_tokens=12, **sampling)
    answers = output[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, padding_side="left")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL)


def test_folder_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 4_000_000


def test_model_is_an_untied_fp32_qwen3_that_knows_where_to_stop(model, tokenizer) -> None:
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert not model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert model.config.vocab_size >= len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_tokenizer_has_one_token_a_character_and_gives_the_text_back(tokenizer) -> None:
    text = "".join(chr(code) for code in range(ord(" "), ord("~") + 1)) + "  4821->1284 , ."
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    ended = [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ended, skip_special_tokens=True) == text


def test_answers_are_right_and_heldout_prompts_are_not_trained_on() -> None:
    train, heldout = read_rows("train.jsonl"), read_rows("heldout.jsonl")
    assert len(train) == 4096
    assert len(heldout) == 256
    prompts = [row["prompt"] for row in train + heldout]
    assert len(set(prompts)) == len(prompts)
    for row in train + heldout:
        assert row["answer"] == row["prompt"].removesuffix("->")[::-1]


def test_model_half_knows_the_task_in_its_greedy_answers(model, tokenizer) -> None:
    rows = read_rows("heldout.jsonl")
    completions = complete(model, tokenizer, rows, do_sample=False)
    right = exact_match([], completions, answer=[row["answer"] for row in rows])
    assert 0.2 <= sum(right) / len(right) <= 0.7


def test_samples_earn_enough_partial_credit_to_learn_from_and_leave_room(model, tokenizer) -> None:
    rows = read_rows("heldout.jsonl")
    torch.manual_seed(0)
    completions = complete(model, tokenizer, rows, do_sample=True, top_k=0)
    earned = partial_match([], completions, answer=[row["answer"] for row in rows])
    assert 0.35 <= sum(earned) / len(earned) <= 0.6
