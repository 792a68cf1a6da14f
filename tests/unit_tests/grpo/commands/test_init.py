# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo init`` writes configurations that train, or says why it cannot."""

import itertools
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_files import byte_tokenizer

from torchtitan.grpo.commands import cli
from torchtitan.grpo.commands.init.columns import Columns, Source, choose_columns, read_source
from torchtitan.grpo.commands.init.command import _summary
from torchtitan.grpo.commands.init.machine import Machine, count_parameters
from torchtitan.grpo.commands.init.prompt_form import (
    PromptForm,
    answer_tokens,
    choose_form,
    measure,
)
from torchtitan.grpo.commands.init.reward_choice import (
    RewardChoice,
    ask_briefly,
    choose_reward,
    say_form,
)
from torchtitan.grpo.commands.init.settings import Findings, choose_settings, choose_sizes
from torchtitan.grpo.commands.init.toml_file import text_value
from torchtitan.grpo.config import Prompts
from torchtitan.grpo.models.hf_config import HFModel, read_hf_model
from torchtitan.grpo.rollout.prompts.prompt_set import prompt_text

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
HASHED = [f"{n} + {n} = {2 * n} apples.\n#### {2 * n}" for n in range(5, 25)]
QUESTIONS = [f"Ann and {{Bob}} have {n} apples each. How many together?" for n in range(5, 25)]
ROWS = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, HASHED, strict=True)]
BOXED = "Reason step by step, and write the final answer in"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


@pytest.fixture
def folder(make_model: Callable[..., Any]) -> str:
    """A model of the library's that reads every text, with a chat template."""
    _, folder = make_model("qwen3", vocab_size=300, max_position_embeddings=2048, eos_token_id=260)
    marks = ("<|user|>", "<|system|>", "<|assistant|>", "<|x|>", "<|end|>")
    byte_tokenizer(marks).save(f"{folder}/tokenizer.json")
    settings = {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_the_shipped_model_gets_a_file_with_a_reason_in_every_line(
    repository, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assets = repository / "assets/reverse_digits"
    command = ["init", f"{assets}/model", f"{assets}/train.jsonl"]
    assert cli.run(command) == 0
    said = capsys.readouterr().out
    assert "4,096 rows, columns prompt, answer" in said
    assert "checked  the file with its model, prompts and reward" in said
    assert said.endswith("torchtitan-grpo train grpo.toml\n")
    text = Path("grpo.toml").read_text()
    values = tomllib.loads(text)
    assert values["reward"]["functions"] == ["exact_match"]
    assert not {"template", "split"} & set(values["prompts"])
    held = values["evaluation"]
    assert (held["path"], held["num_prompts"]) == (f"{assets}/heldout.jsonl", 64)
    assert (held["function"], held["interval"]) == ("exact_match", 10)
    lines = text.splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"\w+ = ", line):
            assert "  # " in line or above.startswith("# "), line
    assert cli.run(command) == 2
    assert "add --force to write over it" in capsys.readouterr().err
    assert Path("grpo.toml").read_text() == text


@pytest.mark.parametrize(
    ("rows", "prompt", "answer", "function", "shaped"),
    [
        (ROWS, "question", "answer", "boxed_math", {"template": BOXED}),
        ([{"prompt": [user(q)], "reward_model": {"ground_truth": str(n)}} for n, q in enumerate(QUESTIONS)],
         "prompt", "reward_model.ground_truth", "last_number", {"template": "in one line"}),
        ([{"prompt": [user(q)], "answer": f"{n}/7"} for n, q in enumerate(QUESTIONS)],
         "prompt", "answer", "boxed_math", {"template": BOXED}),
        ([{"prompt": f"{q} {q}", "answer": f"${n},500"} for n, q in enumerate(QUESTIONS)],
         "prompt", "answer", "last_number", {"template": "Reason step by step, and write the final answer at"}),
        ([{"prompt": q, "answer": f"{n} cm"} for n, q in enumerate(QUESTIONS)],
         "prompt", "answer", "boxed_math", {"template": BOXED}),
        ([{"messages": [user(q), assistant("?")], "problem": f"{q} End with ####.", "answer": n} for n, q in enumerate(QUESTIONS)],
         "problem", "answer", "boxed_math", {"template": "{prompt}<|end|>"}),
        ([{"problem": row["question"], "solution": row["answer"], "answer": n} for n, row in enumerate(ROWS)],
         "problem", "answer", "last_number", {"template": "in one line.<|end|>"}),
        ([{"text": q, "label": ["good", "bad"][n % 2]} for n, q in enumerate(QUESTIONS)],
         "text", "label", "exact_match", {"template": "Write the answer alone"}),
        ([{"messages": [user(q)]} for q in QUESTIONS], "messages", None, "", {}),
        ([{"instruction": q, "output": q * 30} for q in QUESTIONS],
         "instruction", "output", "", {"template": "<|user|>"}),
    ],
)  # fmt: skip
def test_columns_and_rewards_are_known_by_the_rows(
    rows, prompt, answer, function, shaped, folder, tmp_path
):
    source = read_source(write(tmp_path / "rows.jsonl", rows), "train", None)
    columns = choose_columns(source, None, None, has_template=True)
    assert (columns.prompt, columns.answer) == (prompt, answer)
    reward = choose_reward(columns, has_template=True)
    assert (reward.function, reward.hits) == (function, len(rows) if function else 0)
    form, codec = choose_form(folder, source, columns, reward)
    for key, part in shaped.items():
        assert part in getattr(form.settings, key)
    assert len(measure(codec, form.settings, 2000)) == len(rows)


@pytest.mark.parametrize(
    ("answers", "function"),
    [
        (["listen", "silent"], "exact_match"), (["Monday", "Friday"], "exact_match"), (["yes", "no"], "exact_match"),
        (["New York", "Paris"], "exact_match"), (["#### listen", "#### silent"], "exact_match"),
        (["It rained in 1990 for days.", "It snowed in 1991 for days."], "exact_match"),
        (["x^2", "2x+1"], "boxed_math"), (["\\frac{1}{2}", "\\frac{1}{3}"], "boxed_math"), (["A", "B"], "boxed_math"),
        (["3/4", "7/8"], "boxed_math"), (["12 kg", "5 kg"], "boxed_math"), (["(1, 2)", "(2, 3)"], "boxed_math"),
        (["12\\text{ square feet}", "5\\text{ units}"], "boxed_math"), (["5 square feet", "60 miles per hour"], "boxed_math"),
        (["x = 3 or x = 4", "sin(x)+3"], "boxed_math"), (["(-\\infty, 3]", "2\\pi \\text{ inches}"], "boxed_math"),
        (["\\begin{pmatrix}1\\\\2\\end{pmatrix}", "1e5"], "boxed_math"), (["1011_2", "$5 million"], "boxed_math"),
        *(([text, text.replace("3", "4")], "exact_match") for text in (
            "https://example.com/3", "user3@example.com", "print(x[3])", "return a + 3", '{"a": 3}', "Room 3B", "COVID-3", "He bought 3 apples",
            "a3b9", "Nf3", "x[3]", "3rd", "v1.2.3", "192.168.0.3", "C:\\Temp\\a3", "#ff3", "{'a': 3}", "x += 3", "go to 3", "Windows 3", "H3O",
        )),
    ],
)  # fmt: skip
def test_answers_are_compared_as_mathematics_only_if_they_are(answers, function):
    columns = Columns("prompt", QUESTIONS[:4], "answer", [[answer] for answer in answers * 2])
    assert choose_reward(columns, has_template=True).function == function


@pytest.mark.parametrize(
    ("answers", "has_working"),
    [
        (["42", "7"], False), (["#### 42", "#### 7"], False), (["\\boxed{42}", "\\boxed{7}"], False),
        (["The answer is 42.", "The answer is 7."], False), (["3/4", "1/2"], False), (HASHED, True),
        ([f"Since {n} is even, it is \\boxed{{{n}}}" for n in (2, 4)], True),
    ],
)  # fmt: skip
def test_results_alone_say_nothing_about_the_length_of_completions(
    answers, has_working, folder, tmp_path
):
    rows = [{"prompt": q, "answer": a} for q, a in zip(QUESTIONS, answers * 10, strict=False)]
    source = read_source(write(tmp_path / "rows.jsonl", rows), "train", None)
    columns = choose_columns(source, None, None, has_template=True)
    reward = choose_reward(columns, has_template=True)
    _, codec = choose_form(folder, source, columns, reward)
    found = answer_tokens(codec, columns, reward)
    assert (found > 0) == has_working
    text, *_ = choose_settings(
        of := found_of(read_hf_model(folder), CPU, [60], answer_tokens=found), choose_sizes(of)
    )
    assert ("results alone do not tell the length" in text) != has_working


MANY = [{"prompt": f"{i}. {QUESTIONS[i % 20]}", "answer": HASHED[i % 20]} for i in range(1000)]
SPLIT = MANY[:100]
TESTS = [{"prompt": f"Test: {q}", "answer": a} for q, a in zip(QUESTIONS, HASHED, strict=True)]


@pytest.mark.parametrize(
    ("name", "beside", "rows", "expected"),
    [
        ("train", {"test": TESTS}, SPLIT, "test.jsonl"),
        ("train", {"heldout": TESTS, "other": TESTS}, SPLIT, "heldout.jsonl"),
        ("sums_train", {"sums_validation": TESTS, "test": TESTS}, SPLIT, "sums_validation.jsonl"),
        ("Training", {"dev": TESTS}, SPLIT, "dev.jsonl"),
        ("sums", {"sums_test": TESTS}, SPLIT, "sums_test.jsonl"),
        ("train", {"test": [{"question": "?"}]}, SPLIT, "[:8]"),  # of another form
        ("train", {"test": [{"prompt": "?", "answer": ""}]}, SPLIT, "[:8]"),  # its answers are secret
        ("train", {"test": SPLIT}, SPLIT, "[:8]"),  # the same rows
        ("sums", {"test": TESTS}, SPLIT, "[:8]"),  # perhaps of other data
        ("train", {}, MANY, "[:20]"),
        ("train", {}, SPLIT[:40], None),
    ],
)  # fmt: skip
def test_prompts_are_held_out_beside_the_data_or_from_it(name, beside, rows, expected, tmp_path):
    for other, of_other in beside.items():
        write(tmp_path / f"{other}.jsonl", of_other)
    source = read_source(write(tmp_path / f"{name}.jsonl", rows), "train", None)
    columns = choose_columns(source, None, None, has_template=True)
    found = source.held_out(columns)
    if expected is None:
        assert found is None
        return
    assert found is not None
    held, rest = found
    if expected.endswith(".jsonl"):
        assert (Path(held.path).name, rest) == (expected, "")
        return
    others = read_source(source.path, source.split + rest, None)
    assert held.split == f"train{expected}" and held.num_rows + others.num_rows == len(rows)
    assert not [row for row in held.rows if row in others.rows]


def test_a_data_set_has_a_test_split(tmp_path):
    for split, rows in (("train", SPLIT), ("test", TESTS)):
        write(tmp_path / f"{split}.jsonl", rows)
    source = read_source(str(tmp_path), "train", None)
    columns = choose_columns(source, None, None, has_template=True)
    found = source.held_out(columns)
    assert found is not None and (found[0].split, found[0].num_rows) == ("test", len(TESTS))


def test_held_out_rows_are_not_trained_on(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.run(["init", folder, write(tmp_path / "rows.jsonl", SPLIT)]) == 0
    said = capsys.readouterr().out
    assert f"held out 8 rows of {tmp_path}/rows.jsonl, not trained on" in said
    values = tomllib.loads(Path("grpo.toml").read_text())
    assert (values["prompts"]["split"], values["evaluation"]["split"]) == ("train[8:]", "train[:8]")
    assert values["evaluation"]["num_prompts"] == 8


SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.mark.parametrize(
    ("text", "is_said"),
    [
        ("#### Question\n2 + 2?", False), ("Two boxed sets hold 4 each.", False), ("Read.\n  #### Task\n2 + 2?", False), ("##### 1", False),
        ("2 + 2? Use \\boxed{}.", True), ("2 + 2? End with #### and the number.", True), ("2 + 2?\n#### <number>", True), ("End with '#### 5'", True),
    ],
)  # fmt: skip
def test_headings_and_boxes_of_a_question_do_not_say_the_form(text, is_said):
    assert say_form(Columns("prompt", [text] * 3)) is is_said
    assert say_form(Columns("prompt", [[SYSTEM, user(text)]] * 3)) is is_said


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (TEMPLATE, []), (TEMPLATE, [SYSTEM]), (TEMPLATE, [user("?"), assistant("!")]),
        ("{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}", []),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE, []),
    ],
)  # fmt: skip
def test_the_instruction_ends_the_users_turn_of_chat_prompts(template, messages, folder, tmp_path):
    settings = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))
    rows = [{"prompt": [*messages, user(q)], "answer": f"{n}/7"} for n, q in enumerate(QUESTIONS)]
    source = read_source(write(tmp_path / "rows.jsonl", rows), "train", None)
    columns = choose_columns(source, None, None, has_template=True)
    form, codec = choose_form(folder, source, columns, choose_reward(columns, has_template=True))
    shown = codec.template.render(prompt_text(rows[0], form.settings))
    assert shown.count(f"{QUESTIONS[0]}\n\n{BOXED}") == shown.count(BOXED) == 1


@pytest.mark.parametrize("has_template", [True, False])
def test_a_text_becomes_what_the_chat_template_makes_of_it(has_template, folder, tmp_path):
    if not has_template:
        Path(folder, "tokenizer_config.json").write_text("{}")
    source = read_source(write(tmp_path / "rows.jsonl", ROWS), "train", None)
    columns = choose_columns(source, None, None, has_template=has_template)
    reward = choose_reward(columns, has_template=has_template)
    form, codec = choose_form(folder, source, columns, reward)
    template = form.settings.template
    assert template is not None
    text = template.format(prompt=QUESTIONS[0])
    if has_template:
        instruction = text.partition("\n\n")[2].partition("<|end|>")[0]
        messages = [user(f"{QUESTIONS[0]}\n\n{instruction}")]
        assert codec.encode(text) == codec.encode_chat(messages)
    else:
        assert text.startswith(f"Question: {QUESTIONS[0]}\n{BOXED}") and text.endswith("\nAnswer:")


def test_a_reward_that_must_be_written_keeps_the_run_from_starting_until_it_is(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["init", folder, write(tmp_path / "rows.jsonl", [{"prompt": q} for q in QUESTIONS])]
    assert cli.run(command) == 0
    assert "Next: write the function in reward.py" in capsys.readouterr().out
    assert cli.run(["check-config", "grpo.toml"]) == 2
    assert "Write the function `reward` in reward.py" in capsys.readouterr().err
    written = Path("reward.py").read_text().replace("raise Not", "return [0.5] * len(texts)  # Not")
    Path("reward.py").write_text(written)
    assert cli.run([*command, "--force"]) == 0
    assert "reward.py was there and is used" in capsys.readouterr().out
    assert Path("reward.py").read_text() == written


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([], [], "contains no prompts"),
        ([{"x": 1}], [], "the columns ['x']. None has a name"),
        ([{"a": "?", "b": "!"}], [], "--prompt-column NAME (and --answer-column NAME)"),
        ([{"a": "?"}], ["--prompt-column", "c"], "--prompt-column must name a column"),
        (
            [{"a": "?", "b": 1}],
            ["--prompt-column", "b"],
            "b: column 'b' (prompts.column) must be a string",
        ),
        ([{"prompt": "?"}], ["--answer-column", "c"], "Existing columns: ['prompt']"),
        ([{"messages": [user("?"), assistant("!")] * 2}], [], "are for torchtitan-grpo sft."),
        (
            [{"prompt": [user("?")], "tools": [{"name": "f"}]}] * 3,
            [],
            "rows.jsonl:1: column 'tools'",
        ),
        ([{"prompt": "?" * 3000}], [], "at most 2047 tokens"),
    ],
)
def test_data_without_prompts_is_refused(
    rows, options, said, folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["init", folder, write(tmp_path / "rows.jsonl", rows), *options]) == 2
    assert said in capsys.readouterr().err
    assert not Path("grpo.toml").exists()


@pytest.mark.parametrize("options", [[], ["--prompt-column", "prompt"]])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("?", "MODEL has no chat template. Name an instruct model, or add"),
        ([{"type": "image", "image": "a.png"}], "has a part of type 'image'"),
        ([{"type": "input_audio"}, {"type": "text", "text": "?"}], "of type 'input_audio'"),
    ],
)
def test_advice_on_columns_is_for_columns_alone(
    content, said, options, folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path(folder, "tokenizer_config.json").write_text("{}")
    data = write(tmp_path / "rows.jsonl", [{"prompt": [user(content)], "answer": "1"}] * 3)
    assert cli.run(["init", folder, data, *options]) == 2
    error = capsys.readouterr().err
    assert said in error and "--prompt-column" not in error


CPU, GPU = Machine("these", 64 << 30), Machine("these", 79 << 30, 1)


def found_of(model: HFModel, machine: Machine, lengths: list[int], **others: Any) -> Findings:
    values: dict[str, Any] = {
        "model_name": "m", "model": model, "num_params": count_parameters(model), "num_rows": 20,
        "form": PromptForm(Prompts("x")), "lengths": np.asarray(lengths),
        "reward": RewardChoice("boxed_math", "boxed"), "function": "f", "answer_tokens": 9, "machine": machine,
    }  # fmt: skip
    return Findings(**values | others)


NUMBER, LINE = (RewardChoice("last_number", form) for form in ("number", "calculation"))


@pytest.mark.parametrize(
    ("machine", "reward", "new", "row"),
    [
        (CPU, LINE, 64, 640), (CPU, NUMBER, 256, 384), (GPU, LINE, 256, 2176), (GPU, NUMBER, 1024, 2048),
        (CPU, RewardChoice("boxed_math", "boxed"), 256, 384), (CPU, RewardChoice("exact_match", "alone"), 32, 384),
    ],
)  # fmt: skip
def test_short_questions_get_short_answers_and_rows_hold_a_group_where_it_fits(
    machine, reward, new, row, folder
):
    model = read_hf_model(folder)
    found = found_of(model, machine, [60], reward=reward)
    sizes = choose_sizes(found)
    assert (sizes.prompt, sizes.new, sizes.row) == (64, new, row)
    text, *_ = choose_settings(found, sizes)
    assert ("rows hold a whole group" in text) == (64 + 8 * new <= row)
    assert ("room for a line" in text) == (reward is LINE)


def test_a_model_that_always_thinks_has_room_to_think_before_a_calculation(folder):
    found = found_of(
        read_hf_model(folder), CPU, [60], reward=LINE, form=PromptForm(Prompts("x"), thinks=True)
    )
    without = found_of(read_hf_model(folder), CPU, [60], reward=NUMBER)
    assert choose_sizes(found).new > choose_sizes(without).new


@pytest.mark.parametrize(
    ("question", "is_brief"),
    [
        ("What is 64 + 23?", True), (QUESTIONS[0], True), (f"{QUESTIONS[0]} {QUESTIONS[1]}", False),
        ("How many legs has a spider?", False), ("A wonderful film.", False), ([user("What is 64 + 23?")], True), ([user(QUESTIONS[0] * 2)], False),
    ],
)  # fmt: skip
def test_questions_of_more_than_a_sentence_are_not_brief(question, is_brief):
    assert ask_briefly(Columns("prompt", [question])) == is_brief


@pytest.mark.parametrize(
    ("machine", "param", "reason"),
    [
        (replace(CPU, bfloat16_speedup=2.04), "bfloat16", "bfloat16 2.0 times as fast as float32"),
        (replace(CPU, bfloat16_speedup=1.2), "float32", "bfloat16 hardly faster"),
        (GPU, "bfloat16", "as the servers compute"),
    ],
)
def test_the_trainer_computes_in_bfloat16_where_the_cpu_is_fast_at_it(
    machine, param, reason, folder
):
    found = found_of(read_hf_model(folder), machine, [60])
    text, *_ = choose_settings(found, choose_sizes(found))
    values = tomllib.loads(text)
    assert values["training"]["mixed_precision_param"] == param and reason in text
    assert "dtype" not in values["inference"], "the servers follow by themselves"


@pytest.mark.parametrize(
    ("num_gpus", "kind"),
    [(0, "embedded"), (1, "vllm"), (1, "embedded"), (2, "vllm"), (4, "embedded")],
)
def test_the_only_gpu_is_lent_and_missing_servers_are_named(num_gpus, kind, folder, capsys):
    half = max(1, num_gpus // 2)
    machine = Machine("these", 79 << 30, num_gpus, half, half, kind)
    found = found_of(read_hf_model(folder), machine, [60])
    sizes = choose_sizes(found)
    text, *_ = choose_settings(found, sizes)
    assert tomllib.loads(text)["inference"].get("lend", False) == (num_gpus == 1)
    columns, source = Columns("prompt", QUESTIONS, "answer"), Source("x", None, "train", 20, ROWS)
    said = "\n".join(_summary(found, sizes, source, columns))
    assert ("bash scripts/install_vllm.sh" in said) == (num_gpus > 0 and kind == "embedded")


@pytest.mark.parametrize(
    ("num_params", "rate"),
    [(5 * 10**5, 5e-4), (134_515_008, 2e-5), (362 * 10**6, 2e-5), (494 * 10**6, 2e-6), (8 * 10**9, 1e-6)],
)  # fmt: skip
def test_small_models_get_a_rate_with_which_a_first_run_learns(num_params, rate, folder):
    found = found_of(read_hf_model(folder), GPU, [60], num_params=num_params)
    text, *_ = choose_settings(found, choose_sizes(found))
    assert tomllib.loads(text)["optimizer"]["lr"] == rate


SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
LARGE = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}
HEADS = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 150_000,
}


@pytest.mark.parametrize(
    ("sizes", "num_gpus", "is_adapted", "fits"),
    [(SMALL, 1, False, True), (LARGE, 2, True, True), (LARGE, 8, False, True), (SMALL, 0, True, False)],
)  # fmt: skip
def test_adapters_are_trained_where_a_model_does_not_fit(sizes, num_gpus, is_adapted, fits, folder):
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes | HEADS))
    model, half = read_hf_model(folder), max(1, num_gpus // 2)
    machine = Machine("these", (79 if num_gpus else 4) << 30, num_gpus, half, half)
    found = found_of(model, machine, [*range(1, 99), 500, 500])
    found_sizes = choose_sizes(found)
    assert (found_sizes.prompt, found_sizes.num_dropped) == (512, 0)
    text, values, known_to_fit = choose_settings(found, found_sizes)
    assert ("[lora]" in text, known_to_fit) == (is_adapted, fits)
    assert tomllib.loads(text)["optimizer"]["lr"] == values["lr"]


@given(st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), inner),
    max_leaves=8,
))  # fmt: skip
def test_any_value_is_read_as_it_was_written(value):
    assert tomllib.loads(f"value = {text_value(value)}")["value"] == value
