# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sets of held-out prompts: what each inherits, and what is refused."""

import pytest

from torchtitan.grpo.config.evaluation import evaluation_sets, longest_answer
from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_manager import load_config

BASE = [
    "--model.hf_assets_path=model",
    "--reward.functions=exact_match",
    "--inference.launch",
    "--prompts.path=owner/set",
]
TWO = ["--evaluation.sets.a.path=a.jsonl", "--evaluation.sets.b.path=b.jsonl"]


def test_a_set_takes_from_the_table_what_it_does_not_set_itself(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(
        "[evaluation]\nnum_prompts = 9\ntemperature = 0.5\n"
        '[evaluation.sets.a]\npath = "a.jsonl"\nfunction = "boxed_math"\n'
        '[evaluation.sets.b]\npath = "b.jsonl"\nnum_samples = 4\npass_at = [1, 4]\n'
    )
    config = load_config(
        [*BASE, f"--job.config_file={file}", "--evaluation.sets.b.max_new_tokens", "700"]
    )
    sets = evaluation_sets(config.evaluation)
    assert list(sets) == ["a", "b"]
    assert (sets["a"].function, sets["b"].function) == ("boxed_math", "exact_match")
    assert {settings.num_prompts for settings in sets.values()} == {9}
    assert (sets["a"].num_samples, sets["b"].num_samples) == (1, 4)
    assert sets["b"].pass_at == [1, 4]
    assert longest_answer(config.evaluation, config.rollout.max_new_tokens) == 700


def test_a_path_alone_is_one_set_and_nothing_is_none():
    config = load_config([*BASE, "--evaluation.path=a.jsonl", "--evaluation.num_prompts=3"])
    ((name, settings),) = evaluation_sets(config.evaluation).items()
    assert (name, settings.path, settings.num_prompts) == ("heldout", "a.jsonl", 3)
    assert evaluation_sets(load_config(BASE).evaluation) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--evaluation.path=c.jsonl", *TWO], r"evaluation\.path for one set .* evaluation\.sets"),
        (
            ["--evaluation.sets.a.function=f"],
            r"evaluation\.sets\.a\.path must name held-out prompts",
        ),
        (
            [*TWO, "--evaluation.sets.a.num_prompt=3"],
            r"Unknown key evaluation\.sets\.a\.num_prompt\. Did you mean num_prompts\?",
        ),
        ([*TWO, "--evaluation.sets.a.interval=3"], r"interval applies to all sets: move it"),
        (
            [*TWO, "--evaluation.sets.a.num_prompts=-1"],
            r"evaluation\.sets\.a\.num_prompts must be at least 1, or 0 \(all rows\), got -1",
        ),
        (
            [*TWO, "--evaluation.sets.b.num_prompts=many"],
            r"Expected `int`, got `str` - at evaluation\.sets\.b\.num_prompts",
        ),
        (["--evaluation.sets={a = 3}"], r"must be a table"),
        (["--evaluation.sets.a/b.path=x"], r"letters, digits"),
        (
            ["--evaluation.path=a.jsonl", "--evaluation.num_samples=4"],
            r"evaluation\.num_samples = 4 needs evaluation\.temperature above 0",
        ),
        (
            ["--evaluation.path=a.jsonl", "--evaluation.top_p=0.9"],
            r"evaluation\.top_p needs evaluation\.temperature above 0",
        ),
        (
            [*TWO, "--evaluation.temperature=1", "--evaluation.sets.b.pass_at=[2]"],
            r"pass_at must be at least 1 and at most evaluation\.sets\.b\.num_samples \(1\), got 2",
        ),
        (["--evaluation.path=a.jsonl", "--evaluation.top_p=1.5"], r"top_p must be above 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*BASE, *arguments])
