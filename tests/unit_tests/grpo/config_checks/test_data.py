"""What the configuration says of recorded rollouts, minibatches and the mix-in."""

import pytest

from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_checks.description import describe_plan
from torchtitan.grpo.config_manager import load_config

LIVE = [
    "--model.hf_assets_path=model",
    "--prompts.path=prompts.jsonl",
    "--reward.functions=exact_match",
    "--inference.launch",
]


@pytest.fixture
def rollouts(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("{}\n")
    return str(path)


def test_a_replay_needs_no_prompts_rewards_or_servers(rollouts):
    config = load_config(["--model.hf_assets_path=model", f"--rollout.replay={rollouts}"])
    assert config.prompts.path == ""
    assert f"servers: none, rollouts are replayed from {rollouts}" in describe_plan(config)
    # What is set for live rollouts may stay.
    load_config([*LIVE, "--evaluation.path=heldout.jsonl", f"--rollout.replay={rollouts}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollout.replay=/no/file"], r"rollout\.replay must be a file, got /no/file"),
        (["--grpo.ptx_path=/no/file"], r"grpo\.ptx_path must be a file, got /no/file"),
        (["--grpo.num_minibatches=0"], r"grpo\.num_minibatches must be at least 1"),
        (["--grpo.num_minibatches=17"], r"at most grpo\.prompts_per_step \(16\).*got 17"),
        (["--grpo.num_epochs=0"], r"grpo\.num_epochs must be at least 1"),
        (["--grpo.ptx_coef=-1"], r"grpo\.ptx_coef must be at least 0"),
        (["--prompts.row_bucket=0"], r"prompts\.row_bucket must be at least 1"),
        (["--grpo.ptx_per_step=0"], r"grpo\.ptx_per_step must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*LIVE, *arguments])


def test_servers_may_fit_the_longest_sequence_exactly():
    longest = ["--prompts.max_prompt_tokens=100", "--rollout.max_new_tokens=256"]
    config = load_config([*LIVE, *longest, "--inference.max_model_len=356"])
    assert config.inference.max_model_len == 356


def test_recording_a_replay_is_refused(rollouts):
    with pytest.raises(ConfigError, match=r"rollout\.record or rollout\.replay, not both"):
        load_config([*LIVE, f"--rollout.replay={rollouts}", f"--rollout.record={rollouts}"])


def test_each_minibatch_needs_a_supervised_row(rollouts):
    with pytest.raises(ConfigError, match=r"ptx_per_step must be at least .*\(4\).*got 3"):
        load_config(
            [*LIVE, f"--grpo.ptx_path={rollouts}", "--grpo.ptx_per_step=3",
             "--grpo.num_minibatches=4"]
        )  # fmt: skip


def test_supervised_rows_need_the_model_s_own_distribution(rollouts):
    with pytest.raises(ConfigError, match=r"ptx_path needs rollout\.temperature = 1, got 0\.7"):
        load_config([*LIVE, f"--grpo.ptx_path={rollouts}", "--rollout.temperature=0.7"])


def test_a_machine_that_does_not_read_the_file_need_not_have_it(monkeypatch):
    monkeypatch.setenv("GROUP_RANK", "1")
    load_config([*LIVE, "--rollout.replay=/no/file"])
