"""What the configuration says of a loss of the user's and its options."""

from pathlib import Path

import msgspec
import pytest

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_manager import load_config
from torchtitan.grpo.losses.policy_terms import BUILTIN

LIVE = [
    "--model.hf_assets_path=model",
    "--prompts.path=prompts.jsonl",
    "--reward.functions=exact_match",
    "--inference.launch",
]
SOURCE = """
from torchtitan.grpo.losses.loss_metrics import TokenMetric
from torchtitan.grpo.losses.policy_terms import PolicyTerm


def mine(inputs, config, *, weight, floor=0.0, names=()):
    return -(weight + len(names)) * inputs.advantages * inputs.logprobs


def named_as_another(inputs, config):
    losses = -inputs.advantages * inputs.logprobs
    return PolicyTerm(losses, {"loss/total": TokenMetric(losses, "mean")})
"""


@pytest.fixture
def load(tmp_path: Path):
    function = tmp_path / f"loss_{abs(hash(tmp_path))}.py"
    function.write_text(SOURCE)

    def made(options: str, loss: str = "mine"):
        loss = loss if loss in BUILTIN else f"{function}:{loss}"
        file = tmp_path / "run.toml"
        file.write_text(f'[grpo]\npolicy_loss = "{loss}"\n{options}\n')
        return load_config([f"--job.config_file={file}", *LIVE])

    return made


@pytest.mark.parametrize(
    "options",
    [
        'policy_loss_options = { weight = 2.5, names = ["a"] }',
        '[grpo.policy_loss_options]\nweight = 2.5\nnames = ["a"]',
        'policy_loss_options.weight = 2.5\npolicy_loss_options.names = ["a"]',
    ],
)
def test_options_of_a_loss_come_from_the_file(load, options):
    assert load(options).grpo.policy_loss_options == {"weight": 2.5, "names": ["a"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("policy_loss_options = { wight = 1.0 }", r"no option 'wight'\. .* Did you mean weight\?"),
        ("", r"grpo\.policy_loss_options must set weight"),
        ('policy_loss_options = { weight = "a" }', r"failed on an example with TypeError"),
        ("policy_loss_options = 3", r"grpo\.policy_loss_options"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_the_run(load, options, message):
    with pytest.raises(ConfigError, match=message):
        load(options)


def test_a_built_in_loss_has_no_options(load):
    with pytest.raises(ConfigError, match=r"'clip' has no option 'clip_high'\. It takes none"):
        load("policy_loss_options = { clip_high = 0.3 }", loss="clip")


def test_a_metric_with_the_name_of_another_is_refused_before_the_run(load):
    with pytest.raises(ConfigError, match=r"metric 'loss/total', which is the name of a metric of"):
        load("", loss="named_as_another")


def test_the_rollout_process_can_be_given_the_options(load):
    """Its configuration travels as JSON, the whole of ``[grpo]`` with it."""
    grpo = load("policy_loss_options = { weight = 2.5 }").grpo
    assert msgspec.json.decode(msgspec.json.encode(grpo), type=GRPO) == grpo
