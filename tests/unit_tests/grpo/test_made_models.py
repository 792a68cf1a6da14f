# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The shipped task, and the model of scripts/make_gsm8k_cpu.py, are what is promised."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from load_script import load_script
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from torchtitan.grpo.models.embedding_rows import embedding_notes
from torchtitan.grpo.models.hf_config import read_hf_model

TASK = Path(__file__).resolve().parents[3] / "assets" / "reverse_digits"


def test_answers_are_right_and_heldout_prompts_are_not_trained_on() -> None:
    train, heldout = (
        [json.loads(line) for line in (TASK / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (4096, 256)
    prompts = [row["prompt"] for row in train + heldout]
    assert len(set(prompts)) == len(prompts)
    for row in train + heldout:
        assert row["answer"] == row["prompt"].removesuffix("->")[::-1]


def test_no_token_of_the_shipped_model_has_a_row_of_zeros():
    model = read_hf_model(TASK / "model")
    assert list(embedding_notes(model, "model.hf_assets_path")) == []


def test_only_the_row_of_the_padding_differs_from_a_model_that_knows_the_padding():
    script = load_script("scripts/make_tiny_model.py")
    tokenizer = script.build_tokenizer()
    torch.manual_seed(0)
    made = script.build_model(tokenizer)
    torch.manual_seed(0)
    other = Qwen3ForCausalLM(made.config).state_dict()
    embedding = "model.embed_tokens.weight"
    assert made.config.pad_token_id == 0 and not other[embedding][0].any()
    row = made.state_dict()[embedding][0]
    assert row.std().item() == pytest.approx(0.02, rel=0.3)
    other[embedding][0] = row
    assert all(torch.equal(tensor, other[name]) for name, tensor in made.state_dict().items())


# -- scripts/make_gsm8k_cpu.py, on a few rows and two steps -------------------------------


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("scripts/make_gsm8k_cpu.py")


def write_questions(path: Path, num_rows: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for n, m in ((n, n + 1) for n in range(num_rows)):
            question = f"Ann has {n} apples and buys {m} more. How many apples has she?"
            answer = f"She has {n}+{m} = <<{n}+{m}={n + m}>>{n + m} apples.\n#### {n + m}"
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")


def test_a_file_in_gsm8k_form_becomes_a_model_and_two_prompt_files(script, tmp_path):
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
    assert model.get_input_embeddings().weight.any(dim=1).all()
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


def test_a_file_with_other_columns_is_refused_with_its_line(script: ModuleType, tmp_path: Path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(ValueError, match=r"line 1: must have the columns question and answer"):
        script.read_rows(path)
