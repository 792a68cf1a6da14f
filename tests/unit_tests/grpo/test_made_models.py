# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The shipped model and task, and the model of scripts/make_gsm8k_cpu.py, are what is promised."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TASK = Path(__file__).resolve().parents[3] / "assets" / "reverse_digits"
MODEL = TASK / "model"


def read_rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (TASK / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, padding_side="left")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL)


def test_model_is_an_untied_fp32_qwen3_that_knows_where_to_stop(model, tokenizer) -> None:
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert not model.config.tie_word_embeddings and model.dtype == torch.float32
    assert model.config.vocab_size >= len(tokenizer)
    eos = tokenizer.eos_token_id
    assert model.config.eos_token_id == model.generation_config.eos_token_id == eos
    text = "".join(chr(code) for code in range(ord(" "), ord("~") + 1)) + "  4821->1284 , ."
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, eos, tokenizer.pad_token_id], skip_special_tokens=True) == text


def test_answers_are_right_and_heldout_prompts_are_not_trained_on() -> None:
    train, heldout = read_rows("train.jsonl"), read_rows("heldout.jsonl")
    assert len(train) == 4096
    assert len(heldout) == 256
    prompts = [row["prompt"] for row in train + heldout]
    assert len(set(prompts)) == len(prompts)
    for row in train + heldout:
        assert row["answer"] == row["prompt"].removesuffix("->")[::-1]


# -- scripts/make_gsm8k_cpu.py, on a few rows and two steps -------------------------------

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_gsm8k_cpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_gsm8k_cpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_questions(path: Path, num_rows: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for n, m in ((n, n + 1) for n in range(num_rows)):
            question = f"Ann has {n} apples and buys {m} more. How many apples has she?"
            answer = f"She has {n}+{m} = <<{n}+{m}={n + m}>>{n + m} apples.\n#### {n + m}"
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")


def test_a_file_in_gsm8k_form_becomes_a_model_and_two_disjoint_prompt_files(
    script: ModuleType, tmp_path: Path
) -> None:
    write_questions(tmp_path / "gsm8k.jsonl", 48)
    output = tmp_path / "made"
    script.main(
        ["--train", str(tmp_path / "gsm8k.jsonl"), "--output", str(output)]
        + ["--steps", "2", "--heldout-rows", "8", "--threads", "1"]
    )
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    text = "Question: Is 42 > 7?\nAnswer: Yes.\n#### 42"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert model.config.vocab_size % 32 == 0
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    train, heldout = (
        {json.loads(line)["question"] for line in (output / name).read_text().splitlines()}
        for name in ("train.jsonl", "heldout.jsonl")
    )
    assert (len(train), len(heldout)) == (40, 8)
    assert not train & heldout
    examples = [json.loads(line) for line in (output / "examples.jsonl").read_text().splitlines()]
    assert {example["question"] for example in examples} == train
    for example in examples:
        assert re.fullmatch(
            r" She has (\d+)\+(\d+) = (\d+) apples.\n#### \3", example["completion"]
        )


def test_a_file_with_other_columns_is_refused_with_its_line(
    script: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(ValueError, match=r"line 1: must have the columns question and answer"):
        script.read_rows(path)
