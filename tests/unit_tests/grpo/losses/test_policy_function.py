"""A policy loss of the user's: found, tried, and used like the built-in ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.objective import metric_reductions, objective
from torchtitan.grpo.losses.policy_function import check_policy_function
from torchtitan.grpo.losses.policy_terms import BUILTIN

SOURCE = """
import torch

from torchtitan.grpo.losses.loss_metrics import TokenMetric
from torchtitan.grpo.losses.policy_terms import PolicyTerm

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

def measured(inputs, config, *, ceiling, floor=0.0):
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    losses = -ratio.clamp(floor, ceiling) * inputs.advantages
    return PolicyTerm(losses, {
        "loss/held_fraction": TokenMetric(ratio > ceiling, "mean"),
        "loss/largest_ratio": TokenMetric(ratio, "max"),
        "loss/smallest_ratio": TokenMetric(ratio, "min"),
        "loss/held_tokens": TokenMetric(ratio > ceiling, "sum"),
    })

def with_metrics(metrics):
    return lambda inputs, config: PolicyTerm(
        -inputs.advantages * inputs.logprobs, metrics(inputs.logprobs)
    )

elsewhere = with_metrics(lambda x: {"policy/mine": TokenMetric(x, "mean")})
unnamed = with_metrics(lambda x: {"loss/": TokenMetric(x, "mean")})
bare = with_metrics(lambda x: {"loss/mine": x})
median = with_metrics(lambda x: {"loss/mine": TokenMetric(x, "median")})
reduced = with_metrics(lambda x: {"loss/mine": TokenMetric(x.mean(), "mean")})
total = with_metrics(lambda x: {"loss/total": TokenMetric(x, "mean")})
"""


@pytest.fixture
def path(tmp_path: Path):
    file = tmp_path / f"mine_{abs(hash(tmp_path))}.py"
    file.write_text(SOURCE)
    return lambda name: f"{file}:{name}"


def test_a_loss_of_ones_own_is_treated_like_a_built_in_one(lab, path):
    own = GRPO(policy_loss=path("clip"), mismatch_max_k3=0.4)
    built_in = GRPO(policy_loss="clip", mismatch_max_k3=0.4)
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
    config = GRPO(policy_loss=path("measured"), policy_loss_options={"ceiling": 1.2})
    check_policy_function(config)
    packed = lab.pack(lab.make_sequences(0), [[0, 1, 2, 3]], 32, config)
    inputs = replace(packed, logprobs=packed.logprobs.detach(), entropy=packed.entropy.detach())
    compiled = torch.compile(objective, fullgraph=True, backend="eager")
    (loss, metrics), (expected_loss, expected) = compiled(inputs, config), objective(inputs, config)
    torch.testing.assert_close(loss, expected_loss)
    assert metrics.keys() == expected.keys() >= {"loss/largest_ratio"}
    for name, metric in metrics.items():
        assert metric.reduction == expected[name].reduction
        torch.testing.assert_close(metric.numbers, expected[name].numbers)


ONE_LOSS = r"must return a tensor \[2, 5\], one loss a token, got "


MISTAKES = {
    "scalar": ONE_LOSS + r"\[\]",
    "nothing": ONE_LOSS + "NoneType",
    "detached": r"failed on an example with RuntimeError: .*does not require grad",
    "infinite": r"must give finite losses and gradients",
    "narrow": r"TypeError: .*called as function\(inputs: PolicyInputs, config: GRPO, \*\*options",
    "misspelt": r"with AttributeError: .*no attribute 'logprob'",
    "raising": r"failed on an example with ValueError: not today",
    "no_such": r"has no 'no_such'\. It has bare, clip",
    "clop": r"'clop' must be .*cispo, clip, gspo",
    "total": r"'loss/total', which is the name of a metric of every",
    "elsewhere": r"must begin with 'loss/', got 'policy/mine'",
    "unnamed": r"must begin with 'loss/', got 'loss/'",
    "bare": r"'loss/mine' must be a TokenMetric\(values, reduction\), got a Tensor",
    "median": r"reduction of metric 'loss/mine' must be sum, mean, max or min, got 'median'",
    "reduced": r"'loss/mine' must be a tensor \[2, 5\], one value a token, got \[\]",
}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {}, message) for name, message in MISTAKES.items()),
        ("measured", {"ceiling": 1.0, "flor": 0.5},
         r"has no option 'flor'\. It takes ceiling, floor\. Did you mean floor\?"),
        ("measured", {"floor": 0.5}, r"must set ceiling: .*measured' has no default\. Got"),
        ("measured", {"ceiling": "high"}, r"failed on an example with TypeError.*'ceiling': 'high'"),
        *((name, {"ceiling": 1.0}, r"no option 'ceiling'\. It takes none\.")
          for name in ("clip", "gspo")),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_training(path, name, options, message):
    loss = name if name in (*BUILTIN, "clop") else path(name)
    config = GRPO(policy_loss=loss, policy_loss_options=options)
    refuse = metric_reductions if name == "total" else check_policy_function
    with pytest.raises(ValueError, match=rf"(?s)^grpo\.policy_loss.*{message}"):
        refuse(config)


def test_metrics_of_ones_own_are_combined_by_their_reductions(lab, path):
    config = GRPO(policy_loss=path("measured"), policy_loss_options={"ceiling": 1.1})
    check_policy_function(config)
    sequences = lab.make_sequences(0, num_ptx=0)
    inputs = lab.pack(sequences, [[0, 1, 2], [3, 4], [5, 6]], 24, config, junk=float("nan"))
    microbatches = [objective(lab.row_slice(inputs, i, i + 1), config)[1] for i in range(3)]
    metrics = lab.metrics_of(config, *microbatches)
    ratios = torch.cat([torch.exp(s.logprobs.detach() - s.old) for s in sequences])
    assert metrics["loss/held_tokens"] == (ratios > 1.1).sum() > 0
    assert metrics["loss/held_fraction"] == pytest.approx((ratios > 1.1).double().mean().item())
    assert metrics["loss/largest_ratio"] == pytest.approx(ratios.max().item())
    assert metrics["loss/smallest_ratio"] == pytest.approx(ratios.min().item())
    # Those of every loss are there as well.
    assert metrics.keys() > metric_reductions(GRPO()).keys() - {"policy/entropy"}
    assert metrics["loss/clipped_fraction"] == 0
