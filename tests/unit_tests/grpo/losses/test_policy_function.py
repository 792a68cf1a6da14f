"""A policy loss of the user's: found, tried, and used like the built-in ones."""

from pathlib import Path

import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.objective import LossInputs, objective
from torchtitan.grpo.losses.policy_function import check_policy_function, policy_function

SOURCE = """
import torch

def clip(inputs, config):
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    held = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratio * inputs.advantages, held * inputs.advantages)

def scalar(inputs, config):
    return clip(inputs, config).mean()

def nothing(inputs, config):
    pass

def detached(inputs, config):
    return -inputs.advantages * inputs.logprobs.detach()

def infinite(inputs, config):
    return inputs.logprobs / (inputs.advantages - inputs.advantages)

def narrow(inputs):
    return inputs.logprobs

def misspelt(inputs, config):
    return inputs.logprob

def raising(inputs, config):
    raise ValueError("not today")

def bug(inputs, config):
    return inputs.logprobs @ inputs.logprobs
"""


@pytest.fixture
def path(tmp_path: Path):
    file = tmp_path / f"mine_{abs(hash(tmp_path))}.py"
    file.write_text(SOURCE)
    return lambda name: f"{file}:{name}"


def test_a_loss_of_ones_own_is_treated_like_a_built_in_one(lab, path):
    own = GRPO(policy_loss=path("clip"), mismatch_veto=0.4)
    built_in = GRPO(policy_loss="clip", mismatch_veto=0.4)
    check_policy_function(own)
    results = []
    for config in (own, built_in):
        sequences = lab.make_sequences(0)
        inputs = lab.pack(sequences, [[0, 1, 2, 3]], 32, config, junk=float("nan"))
        loss, _ = objective(inputs, config)
        loss.backward()
        results.append((loss.detach(), lab.gradients(sequences)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


def test_a_loss_of_ones_own_compiles(lab, path):
    config = GRPO(policy_loss=path("clip"))
    check_policy_function(config)
    packed = lab.pack(lab.make_sequences(0), [[0, 1, 2, 3]], 32, config)
    inputs = LossInputs(**{name: value.detach() for name, value in vars(packed).items()})
    compiled = torch.compile(objective, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(inputs, config), objective(inputs, config))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scalar", r"must return a tensor \[2, 5\], one loss a token, got \[\]"),
        ("nothing", r"one loss a token, got NoneType"),
        ("detached", r"failed on an example with RuntimeError: .*does not require grad"),
        ("infinite", r"must give finite losses and gradients"),
        ("narrow", r"with TypeError: .*called as function\(inputs: PolicyInputs, config: GRPO\)"),
        ("misspelt", r"with AttributeError: .*no attribute 'logprob'"),
        ("bug", r"with RuntimeError"),
        ("raising", r"failed on an example with ValueError: not today"),
        ("no_such", r"has no 'no_such'\. It has bug, clip"),
    ],
)
def test_a_loss_that_cannot_work_is_refused_before_training(path, name, message):
    with pytest.raises(ValueError, match=message) as error:
        check_policy_function(GRPO(policy_loss=path(name)))
    assert str(error.value).startswith("grpo.policy_loss '")


def test_a_misspelt_built_in_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"grpo\.policy_loss 'clop' must be .*cispo, clip, gspo"):
        policy_function("clop")


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo", "reinforce"])
def test_built_in_losses_pass_the_check(name):
    check_policy_function(GRPO(policy_loss=name))
