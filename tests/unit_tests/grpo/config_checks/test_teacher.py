# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the configuration says of teachers."""

import pytest

from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_manager import load_config

LIVE = ["--model.hf_assets_path=model", "--prompts.path=prompts.jsonl", "--inference.launch"]
TAUGHT = [*LIVE, "--teacher.urls=http://127.0.0.1:9000"]


def test_a_teacher_needs_no_reward_and_no_group():
    config = load_config([*TAUGHT, "--grpo.group_size=1"])
    assert not config.has_rewards
    assert load_config([*TAUGHT, "--reward.functions=exact_match"]).has_rewards
    with pytest.raises(ConfigError, match=r"Only with a teacher \(teacher\.urls\)"):
        load_config(LIVE)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--teacher.urls=localhost"], r"teacher\.urls must look like http://host:port"),
        (["--teacher.urls=http://a:99999"], r"teacher\.urls must .* from 1 to 65535"),
        (
            ["--inference.no-launch", "--inference.urls=HTTP://127.0.0.1:9000/"],
            r"must be other servers than those of inference\.urls",
        ),
        (["--rollout.temperature=0.7"], r"teacher\.urls needs rollout\.temperature = 1, got 0\.7"),
        (["--rollout.top_p=0.9"], r"teacher\.urls needs rollout\.top_p = 1, got 0\.9"),
        (["--teacher.coef=0"], r"teacher\.coef must be above 0 without reward\.functions"),
        (["--grpo.filter_zero_advantage"], r"filter_zero_advantage cannot be used with teacher"),
        (
            ["--rollout.earlier_turns", "as_templated"],
            r"teacher.urls needs rollout.earlier_turns",
        ),
        (
            ["--grpo.off_policy_mask_threshold=0.5"],
            r"off_policy_mask_threshold cannot be used with teacher\.urls, got 0\.5",
        ),
        (["--rollout.dynamic_sampling"], r"dynamic_sampling cannot be used with teacher\.urls"),
        (
            ["--rollout.dynamic_sampling", "--reward.functions=exact_match"],
            r"groups with equal rewards would be left out, although the teacher's part differs",
        ),
        (["--teacher.top_k=129"], r"teacher\.top_k must be at least 0 and at most 128, got 129"),
        (
            ["--teacher.top_k=8", "--teacher.max_divergence=5"],
            r"max_divergence cannot be used with teacher\.top_k, got 5",
        ),
        (
            ["--teacher.top_k=8", "--grpo.filter_zero_advantage"],
            r"filter_zero_advantage cannot be used with teacher",
        ),
        (
            ["--inference.no-launch", "--inference.urls=http://127.0.0.1:9000"],
            r"must be other servers than those of inference\.urls",
        ),
    ],
)
def test_what_cannot_work_is_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*TAUGHT, *more])


def test_top_k_leaves_the_advantage_of_a_sequence_as_it_is():
    more = ["--teacher.top_k=8", "--grpo.off_policy_mask_threshold=0.5", "--grpo.group_size=1"]
    assert load_config([*TAUGHT, *more]).teacher.top_k == 8


@pytest.mark.parametrize("key", ["top_k=8", "coef=0.5", "max_divergence=5.0"])
def test_how_ratings_teach_needs_a_teacher_or_a_file_that_one_has_rated(tmp_path, key):
    name, value = key.split("=")
    with pytest.raises(
        ConfigError, match=rf"teacher\.{name} needs teacher\.urls, or rated rollouts"
    ):
        load_config([*LIVE, "--reward.functions=exact_match", f"--teacher.{key}"])
    file = tmp_path / "rollouts.jsonl"
    file.write_text("")
    replay = ["--model.hf_assets_path=model", f"--rollout.replay={file}"]
    assert getattr(load_config([*replay, f"--teacher.{key}"]).teacher, name) == float(value)


def test_settings_of_a_teacher_need_one():
    with pytest.raises(ConfigError, match=r"teacher\.wait_seconds needs teacher\.urls"):
        load_config([*LIVE, "--reward.functions=exact_match", "--teacher.wait_seconds=50"])


def test_a_key_without_a_teacher_is_refused_and_not_shown(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('[teacher]\napi_key = "secret"\n')
    with pytest.raises(ConfigError, match=r"teacher\.api_key needs teacher\.urls") as refused:
        load_config([f"--job.config_file={file}", *LIVE, "--reward.functions=exact_match"])
    assert "secret" not in str(refused.value)


def test_the_key_is_masked_and_not_taken_from_the_command_line(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('[teacher]\napi_key = "secret"\n')
    config = load_config([f"--job.config_file={file}", *TAUGHT])
    assert config.to_dict()["teacher"]["api_key"] == "***"
    with pytest.raises(ConfigError, match="TORCHTITAN_GRPO_TEACHER_KEY"):
        load_config([*TAUGHT, "--teacher.api_key=secret"])
