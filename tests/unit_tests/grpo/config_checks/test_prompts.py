# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the configuration says of one set of prompts, and of several."""

import pytest

from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_manager import load_config

LIVE = ["--model.hf_assets_path=model", "--reward.functions=exact_match", "--inference.launch"]
TWO = "--prompts.paths=owner/one,owner/two"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"prompts\.path must name the prompts, or prompts\.paths .* got nothing"),
        ([TWO, "--prompts.path=a.jsonl"], r"prompts\.path or prompts\.paths, not both, got 'a"),
        (["--prompts.paths=owner/one,owner/one"], r"prompts\.paths must name each set once"),
        (["--prompts.paths=owner/one,/no/a.parquet"], r"prompts\.paths .* a file, got /no/a\.parq"),
        ([TWO, "--prompts.weights", "1"], r"prompts\.weights must have .* 2 prompts\.paths.*got 1"),
        ([TWO, "--prompts.weights", "1", "0"], r"prompts\.weights must be .* got \[1\.0, 0\.0\]"),
        ([TWO, "--prompts.weights", "1", "-2"], r"prompts\.weights must be finite and above 0"),
        ([TWO, "--prompts.weights", "1", "nan"], r"prompts\.weights must be finite and above 0"),
        ([TWO, "--prompts.weights", "inf", "1"], r"prompts\.weights must be finite and above 0"),
        (["--prompts.path=a.jsonl", "--prompts.weights", "1"], r"weights needs prompts\.paths"),
    ],
)
def test_sets_that_cannot_be_mixed_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*LIVE, *arguments])


def test_several_sets_may_have_weights_and_be_files_or_names(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\n')
    arguments = [f"--prompts.paths={file},owner/two", "--prompts.weights", "0.7", "0.3"]
    prompts = load_config([*LIVE, *arguments]).prompts
    assert (prompts.path, prompts.paths) == ("", [str(file), "owner/two"])
    assert prompts.weights == [0.7, 0.3]
    assert load_config([*LIVE, TWO]).prompts.weights == []


def test_a_directory_may_be_named_like_a_file(tmp_path):
    folder = tmp_path / "shards.parquet"
    folder.mkdir()
    load_config([*LIVE, f"--prompts.paths={folder},owner/two"])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('template = "{prompt}"\nsystem_prompt = "x"', r"prompts\.template .* both"),
        ("chat_template_kwargs = { tokenize = true }", r"got 'tokenize', which the run sets"),
        ('template = ""', r"prompts\.template must contain \{prompt\} .* got ''"),
        ('template = "  "', r"must contain \{prompt\}"),
        ('template = "\\n"', r"must contain \{prompt\}"),
        ('template = "Answer:"', r"must contain \{prompt\}"),
        ('template = "{{prompt}}"', r"must contain \{prompt\}"),
        ('template = "{}"', r"must contain \{prompt\}"),
    ],
)
def test_chat_settings_that_contradict_are_refused(tmp_path, table, message):
    file = tmp_path / "x.toml"
    file.write_text(f'[prompts]\npath = "a.jsonl"\n{table}\n')
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=message):
        load_config([*LIVE, f"--job.config_file={file}"])


@pytest.mark.parametrize("text", ["", " ", "\\n", "\\t  ", "\\u3000"])
def test_a_system_prompt_that_says_nothing_contradicts_no_template(tmp_path, text):
    file = tmp_path / "x.toml"
    file.write_text(
        f'[prompts]\npath = "a.jsonl"\ntemplate = "{{prompt}}"\nsystem_prompt = "{text}"\n'
    )
    load_config([*LIVE, f"--job.config_file={file}"])
