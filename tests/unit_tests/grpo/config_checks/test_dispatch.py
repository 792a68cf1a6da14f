"""What the configuration says of dispatch."""

import pytest

from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_manager import load_config

SETTINGS = [
    "--model.hf_assets_path=model",
    "--prompts.path=prompts.jsonl",
    "--reward.functions=exact_match",
]
LAUNCH = [*SETTINGS, "--inference.launch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollout.hedge_seconds=-1"], r"hedge_seconds must be above 0, or 0 \(never\), got -1"),
        (
            ["--rollout.hedge_seconds=30", "--rollout.request_timeout_seconds=30"],
            r"hedge_seconds must be below rollout\.request_timeout_seconds \(30\).*got 30\.",
        ),
        (["--rollout.hedge_seconds=5"], r"hedge_seconds = 5 needs a second server.*got 1\."),
        (
            ["--rollout.longest_first", "--grpo.prompts_per_step=1"],
            r"longest_first orders the prompts of a batch .* grpo\.prompts_per_step = 1",
        ),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*LAUNCH, *arguments])


def test_a_hedge_needs_two_servers_wherever_they_come_from(tmp_path):
    hedge = "--rollout.hedge_seconds=5"
    load_config([*LAUNCH, hedge, "--inference.num_servers=2"])
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    load_config([*SETTINGS, hedge, f"--inference.urls={','.join(urls)}"])
    with pytest.raises(ConfigError, match="needs a second server"):
        load_config([*SETTINGS, hedge, f"--inference.urls={urls[0]}"])
    # Others may join this one during the run.
    file = tmp_path / "urls"
    file.write_text(urls[0] + "\n")
    load_config([*SETTINGS, hedge, f"--inference.urls_file={file}"])


def test_longest_first_is_taken_with_a_batch_of_prompts():
    assert load_config([*LAUNCH, "--rollout.longest_first"]).rollout.longest_first
