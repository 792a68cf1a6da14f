# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Defaults of torchtitan's tables: those of post-training."""

import tomllib

import pytest

from torchtitan.grpo.config_manager import ConfigError, load_config
from torchtitan.grpo.dry_run import changed_defaults, describe_settings

SMALLEST = """
[model]
hf_assets_path = "assets/reverse_digits/model"
[prompts]
path = "assets/reverse_digits/train.jsonl"
[reward]
functions = ["exact_match"]
[inference]
launch = true
"""


@pytest.fixture
def smallest(tmp_path, repository, monkeypatch):
    """Arguments of a run that sets what must be set and nothing else."""
    monkeypatch.chdir(repository)
    file = tmp_path / "smallest.toml"
    file.write_text(SMALLEST)
    return ["--job.config_file", str(file)]


def test_a_run_that_sets_nothing_is_trained_as_post_training_is(smallest):
    config = load_config(smallest)
    optimizer, schedule = config.optimizer, config.lr_scheduler
    assert (optimizer.lr, optimizer.weight_decay) == (1e-6, 0.0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-8)
    assert (schedule.warmup_steps, schedule.decay_ratio) == (10, 0.0)
    assert config.training.max_norm == 1.0


def test_the_description_names_torchtitans_default_beside_ours(smallest):
    lines = describe_settings(
        load_config([*smallest, "--optimizer.weight_decay=0.01"])
    ).splitlines()
    assert "lr = 1e-06  # the default here; torchtitan's is 0.0008" in lines
    assert "decay_ratio = 0.0  # the default here; torchtitan's is None" in lines
    assert "weight_decay = 0.01" in lines  # it is set, and so no default
    assert "max_norm = 1.0" in lines  # it is the same in both


def test_every_shipped_configuration_sets_the_optimization_that_it_was_measured_with(repository):
    changed = [key for key in changed_defaults() if key.startswith(("optimizer.", "lr_scheduler."))]
    assert len(changed) == 5
    for file in sorted((repository / "train_configs").glob("*.toml")):
        values = tomllib.loads(file.read_text())
        for key in changed:
            table, name = key.split(".")
            assert name in values[table], f"{file.name} leaves {key} to the default"


def test_each_key_whose_default_differs_says_where_the_default_comes_from(repository):
    page = (repository / "docs/configuration.md").read_text()
    for key, (here, upstream) in changed_defaults().items():
        if key.startswith(("optimizer.", "lr_scheduler.")):
            (row,) = [line for line in page.splitlines() if line.startswith(f"| `{key}` ")]
            assert f"`{here!r}` | `{upstream!r}`" in row
            assert "TRL" in row


def test_a_schedule_that_ends_before_the_run_is_refused(smallest):
    with pytest.raises(ConfigError, match=r"total_steps must be at least training\.steps"):
        load_config([*smallest, "--lr_scheduler.total_steps=5", "--training.steps=6"])


def test_a_whole_last_checkpoint_in_hugging_face_form_is_refused(smallest):
    with pytest.raises(ConfigError, match=r"last_save_in_hf needs checkpoint.last_save_model_only"):
        load_config([*smallest, "--checkpoint.last_save_in_hf"])
    load_config([*smallest, "--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"])
