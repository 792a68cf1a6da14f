# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""scripts/make_gsm8k_cpu.py from beginning to end, on a few rows and two steps."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_gsm8k_cpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_gsm8k_cpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_rows(path: Path, num_rows: int) -> None:
    rows = [
        {
            "question": f"Ann has {n} apples and buys {n + 1} more. How many apples has she?",
            "answer": f"She has {n}+{n + 1} = <<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1} apples.\n"
            f"#### {2 * n + 1}",
        }
        for n in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_file_in_gsm8k_form_becomes_a_model_and_two_disjoint_prompt_files(
    script: ModuleType, tmp_path: Path
) -> None:
    write_rows(tmp_path / "gsm8k.jsonl", 48)
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


def test_half_of_the_lessons_lack_the_last_line_and_none_has_annotations(
    script: ModuleType,
) -> None:
    answer = "She has 1+2 = <<1+2=3>>3 apples.\n#### 3"
    rng = script.random.Random(0)
    lines = [script.lesson_answer(answer, 0.5, rng) for _ in range(200)]
    assert set(lines) == {"She has 1+2 = 3 apples.\n#### 3", "She has 1+2 = 3 apples."}
    assert 70 <= sum("####" in line for line in lines) <= 130


def test_a_file_with_other_columns_is_refused_with_its_line(
    script: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(ValueError, match=r"line 1: must have the columns question and answer"):
        script.read_rows(path)
