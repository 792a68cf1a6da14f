# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What ``torchtitan-grpo evaluate`` prints and refuses."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from torchtitan.grpo import cli
from torchtitan.grpo.evaluate import print_table
from torchtitan.grpo.rollout.results import EvaluationResult, SetResult


def test_the_table_is_whole_where_no_terminal_is(capsys):
    of_set = SetResult(
        name="held-out-problems-of-the-competition",
        function="rewards/competition_answers.py:has_equal_answer",
        score=0.625,
        num_prompts=16,
        num_completions=128,
        pass_at={1: 0.625, 4: 0.875, 8: 1.0},
        length_mean=7.0,
        length_max=8,
        cut_fraction=0.25,
        samples=(),
    )
    print_table(EvaluationResult((of_set,), 3, 3, 0.0, 1.5))
    head, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:6] == ["set", "function", "score", "pass@1", "pass@4", "pass@8"]
    assert head[6:] == ["tokens", "longest", "cut", "prompts", "n"]
    assert row[:4] == [of_set.name, of_set.function, "0.6250", "0.6250"]
    assert row[4:] == ["0.8750", "1.0000", "7.0", "8", "25.0%", "16", "8"]


@pytest.mark.parametrize("how", ["config", "tensor"])
@pytest.mark.parametrize("as_option", [True, False])
def test_quantised_weights_are_refused_before_a_server_is_started(
    how, as_option, repository, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(repository)
    model = shutil.copytree("assets/reverse_digits/model", tmp_path / "model")
    if how == "config":
        config = json.loads((model / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (model / "config.json").write_text(json.dumps(config))
    else:
        tensors = load_file(model / "model.safetensors")
        tensors["lm_head.weight"] = tensors["lm_head.weight"].char()
        save_file(tensors, model / "model.safetensors")
    given = ["--model", str(model)] if as_option else [f"--model.hf_assets_path={model}"]
    folder = f"--job.dump_folder={tmp_path / 'run'}"
    assert cli.run(["evaluate", "train_configs/quickstart.toml", folder, *given]) == 2
    said = capsys.readouterr().err
    assert "bfloat16" in said and str(model) in said
    assert not (tmp_path / "run").exists()
