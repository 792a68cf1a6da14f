"""Every variant of the loss against the papers' formulas, written sequence by sequence."""

import math
from dataclasses import replace

import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.losses.objective import LossInputs, objective
from torchtitan.grpo.losses.policy_terms import BUILTIN, PolicyInputs

MASK = {"mismatch_correction": "mask"}
NONE = {"mismatch_correction": "none"}
SAMPLING = {"old_policy": "sampling"}
KL = {"kl_coef": 0.3}
VARIANTS = {
    "default": {},
    "clip_high": {"clip_high": 0.05},
    "clip_low": {"clip_low": 0.05},
    "gspo": {"policy_loss": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    "gspo_sequence_mean": {"policy_loss": "gspo", "aggregation": "sequence_mean"},
    "gspo_uncorrected": {"policy_loss": "gspo"} | NONE,
    "cispo": {"policy_loss": "cispo"},
    "reinforce": {"policy_loss": "reinforce"},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "constant_length": {"aggregation": "constant_length"},
    "sampling": SAMPLING,
    "sampling_gspo": SAMPLING | {"policy_loss": "gspo"},
    "sampling_cispo": SAMPLING | {"policy_loss": "cispo"},
    "uncorrected": NONE,
    "truncate_floor": {"importance_floor": 0.8, "importance_cap": 1.2},
    "truncate_sequence": {"mismatch_level": "sequence", "importance_cap": 1.5},
    "truncate_geometric": {"mismatch_level": "geometric", "importance_cap": 1.1},
    "mask": MASK | {"importance_floor": 0.5, "importance_cap": 1.5},
    "mask_sequence": MASK | {"mismatch_level": "sequence", "importance_floor": 0.6},
    "mask_geometric": MASK | {"mismatch_level": "geometric", "importance_cap": 1.2},
    "max_k3": {"mismatch_max_k3": 0.2},
    "mask_max_k3": MASK | {"importance_cap": 1.4, "mismatch_max_k3": 0.3},
    "sampling_max_k3": SAMPLING | {"mismatch_max_k3": 0.25},
    "uncorrected_max_k3": NONE | {"mismatch_max_k3": 0.2},
    "off_policy_mask": {"off_policy_mask_threshold": 0.1},
    "sampling_off_policy_mask": SAMPLING | {"off_policy_mask_threshold": 0.1},
    **{f"kl_{name}": KL | {"kl_estimator": name} for name in ("k1", "k2", "k3")},
    "entropy": {"entropy_coef": 0.2},
    "ptx": {"ptx_coef": 0.25},
    "everything": MASK | {
        "policy_loss": "gspo", "aggregation": "sequence_mean",
        "mismatch_level": "geometric", "importance_cap": 1.3,
        "mismatch_max_k3": 0.4, "off_policy_mask_threshold": 0.2,
        "kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.05,
    },
}  # fmt: skip
ROWS = [[0, 3], [7, 1, 4], [2], [], [5, 8, 6]]
ROW_LEN = 24

each_variant = pytest.mark.parametrize("name", VARIANTS)


def config_of(name: str) -> GRPO:
    return GRPO(**VARIANTS[name])


def close(got, expected, tolerance=1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * 1e-2)


def run(lab, sequences, inputs, config, loss=objective):
    """Loss, metrics, and gradients of the sequences' leaves."""
    value, metrics = loss(inputs, config)
    value.backward()
    return value.detach(), lab.metrics_of(config, metrics), lab.gradients(sequences)


def expected_of(lab, sequences, config):
    sequences = [s.fresh() for s in sequences]
    loss, metrics = lab.reference(sequences, config)
    loss.backward()
    return loss.detach(), metrics, lab.gradients(sequences)


@each_variant
@pytest.mark.parametrize("packing", ["rows", "one a row", "with an environment's tokens"])
def test_loss_gradients_and_metrics_are_those_of_the_formulas(lab, name, packing):
    config = config_of(name)
    sequences = lab.make_sequences(0 if packing == "rows" else 1)
    if packing == "rows":
        inputs = lab.pack(sequences, ROWS, ROW_LEN, config)
    elif packing == "one a row":
        inputs = lab.pack(sequences, [[i] for i in range(9)], 9, config)
        # Padding may share the one sequence's id: only trained tokens count.
        inputs = replace(inputs, sequence_ids=torch.zeros(9, 9, dtype=torch.int64))
    else:
        inputs = lab.pack(sequences, ROWS, 60, config, junk=3.0, num_observed=2)
    loss, metrics, gradients = run(lab, sequences, inputs, config)
    expected = expected_of(lab, sequences, config)
    close(loss, expected[0])
    close(gradients, expected[2])
    assert metrics == pytest.approx(expected[1], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["max_k3", "mask_max_k3", "off_policy_mask"])
def test_gradients_are_finite_differences(lab, name):
    """Where the loss of a variant is differentiated as a whole, without a stopped gradient."""
    config = config_of(name)
    inputs = lab.pack(lab.make_sequences(0), ROWS, ROW_LEN, config)
    inputs = replace(inputs, entropy=inputs.entropy.detach())

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return objective(replace(inputs, logprobs=logprobs), config)[0]

    assert torch.autograd.gradcheck(loss, (inputs.logprobs.detach().requires_grad_(),))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "default"])
def test_no_variant_goes_unseen_in_these_sequences(lab, name):
    """Otherwise agreement with the formulas would show nothing."""

    def is_seen(seed: int) -> bool:
        sequences = lab.make_sequences(seed)
        own, default = (expected_of(lab, sequences, x) for x in (config_of(name), GRPO()))
        return not any(torch.allclose(own[i], default[i], rtol=1e-6) for i in (0, 2))

    assert is_seen(0) or is_seen(1)


@each_variant
@pytest.mark.parametrize("junk", [math.nan, -math.inf])
def test_anything_may_stand_where_nothing_is_trained(lab, name, junk):
    config = config_of(name)
    clean, dirty = lab.make_sequences(3), lab.make_sequences(3)
    expected = run(lab, clean, lab.pack(clean, ROWS, ROW_LEN, config), config)
    inputs = lab.pack(dirty, ROWS, ROW_LEN, config, junk=junk)
    inputs.logprobs.retain_grad()
    inputs.entropy.retain_grad()
    loss, metrics, gradients = run(lab, dirty, inputs, config)
    assert torch.equal(loss, expected[0])
    assert metrics == expected[1]
    assert torch.equal(gradients, expected[2])
    untrained = ~inputs.loss_mask & (inputs.ptx_weights == 0)
    assert untrained.sum() > 40 and not inputs.logprobs.grad[untrained].any()
    assert inputs.entropy.grad is None or (inputs.entropy.grad[~inputs.loss_mask] == 0).all()


# Inductor takes seconds a variant; the graph is captured whole with either backend. The short suite
# compiles one variant of each kind of branch: the loss, the correction, what masks tokens.
COMPILED_FIRST = ("everything", "gspo", "mask_max_k3", "sampling_gspo", "kl_k3")
COMPILED = [
    pytest.param("everything", "inductor", marks=pytest.mark.long),
    *(
        pytest.param(name, "aot_eager", marks=[] if name in COMPILED_FIRST else pytest.mark.long)
        for name in VARIANTS
    ),
]


@pytest.mark.parametrize(("name", "backend"), COMPILED)
def test_compiled_is_as_eager(lab, name, backend):
    config = config_of(name)
    torch._dynamo.reset()
    compiled = torch.compile(objective, fullgraph=True, backend=backend)
    packed = lab.pack(lab.make_sequences(4), ROWS, ROW_LEN, config)
    results = []
    for loss_of in (objective, compiled):
        leaves = [x.detach().clone().requires_grad_() for x in (packed.logprobs, packed.entropy)]
        inputs = replace(packed, logprobs=leaves[0], entropy=leaves[1])
        loss, metrics = loss_of(inputs, config)
        numbers = {(name, metric.reduction): metric.numbers for name, metric in metrics.items()}
        results.append((loss, numbers, torch.autograd.grad(loss, leaves, allow_unused=True)))
    assert results[0][2][0].abs().sum() > 0
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)


@each_variant
def test_padding_alone_costs_nothing_and_has_gradients_of_zero(lab, name):
    config = config_of(name)
    inputs = lab.pack(lab.make_sequences(0), [[], []], ROW_LEN, config, junk=math.nan)
    logprobs = inputs.logprobs.requires_grad_()
    loss, metrics = objective(inputs, config)
    loss.backward()
    assert loss.item() == 0 and not logprobs.grad.any()
    assert all(number == 0 for metric in metrics.values() for number in metric.numbers)
    assert set(lab.metrics_of(config, metrics).values()) == {0.0}


@each_variant
def test_wild_ratios_stay_finite_in_float32(lab, name):
    """Also their gradients' squares, of which the gradient norm is made."""
    config = config_of(name)
    sequences = lab.make_sequences(6)
    for s in sequences:
        s.old = s.old + 300 * torch.linspace(-1, 1, s.num_tokens, dtype=torch.float64)
        s.ref = s.ref + 200
    inputs = lab.pack(sequences, ROWS, ROW_LEN, config)
    tensors = {name: value for name, value in vars(inputs).items() if torch.is_tensor(value)}
    inputs = LossInputs(
        **{n: x.detach().float() if x.is_floating_point() else x for n, x in tensors.items()}
    )
    logprobs = inputs.logprobs.requires_grad_()
    loss, metrics = objective(inputs, config)
    loss.backward()
    assert loss.isfinite()
    assert all(number.isfinite() for metric in metrics.values() for number in metric.numbers)
    assert logprobs.grad.square().sum().isfinite()


def test_in_the_reward_the_penalty_is_logged_and_not_added(lab):
    sequences = lab.make_sequences(0)
    config = GRPO(kl_coef=0.3, kl_in="reward")
    inputs = lab.pack(sequences, ROWS, ROW_LEN, config)
    loss, metrics, _ = run(lab, sequences, inputs, config)
    close(loss, expected_of(lab, sequences, GRPO())[0])
    assert metrics["loss/reference_kl"] > 0


def test_inputs_that_lack_the_reference_or_differ_in_shape_are_refused(lab):
    config = GRPO(kl_coef=0.1)
    inputs = lab.pack(lab.make_sequences(0), ROWS, ROW_LEN, config)
    bare = replace(inputs, ref_logprobs=None)
    with pytest.raises(ValueError, match=r"ref_logprobs must be given with grpo\.kl_coef = 0\.1"):
        objective(bare, config)
    assert objective(bare, GRPO())[0].isfinite()
    with pytest.raises(ValueError, match=r"one shape \[rows, seq\], .*'advantages': \(5, 3\)"):
        objective(replace(inputs, advantages=torch.zeros(5, 3)), config)


def term_of(ratios: list[float], advantages: list[float], **settings) -> list[list[float]]:
    """The losses of sequences of one token each, and the gradient of their sum."""
    config = GRPO(**settings)
    logprobs = torch.full((1, len(ratios)), -2.0, dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - torch.tensor([ratios], dtype=torch.float64).log()
    inputs = PolicyInputs(
        logprobs, old, old, torch.tensor([advantages], dtype=torch.float64), torch.zeros_like(old),
        torch.ones_like(old, dtype=torch.bool), torch.arange(len(ratios))[None],
    )  # fmt: skip
    losses = BUILTIN[config.policy_loss](inputs, config).token_losses
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return [losses[0].tolist(), gradient[0].tolist()]


def test_clip_is_that_worked_out_by_hand():
    """The bounds are 0.8 and 1.3; the gradient of ``-ratio * A`` is itself where nothing is clipped."""
    ratios, advantages = [2, 2, 0.5, 0.5, 1.1], [1, -1, 1, -1, 3]
    losses, gradient = term_of(ratios, advantages, clip_low=0.2, clip_high=0.3)
    assert losses == pytest.approx([-1.3, 2, -0.5, 0.8, -3.3])
    assert gradient == pytest.approx([0, 2, -0.5, 0, -3.3])


@pytest.mark.parametrize("name", ["clip", "gspo"])
def test_a_ratio_at_its_bound_is_not_clipped(name):
    """With a lower bound of 1, each ratio is at a bound until the policy has been trained."""
    assert term_of([1, 1], [2, -1], policy_loss=name, clip_low=0.0)[1] == [-2, 1]


def test_gspo_passes_no_gradient_to_tokens_that_are_weighted_out():
    """GSPO-token: in the sequence form the first token would get half of it."""
    config = GRPO(policy_loss="gspo")
    logprobs = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    same = torch.zeros(1, 2, dtype=torch.float64)
    inputs = PolicyInputs(
        logprobs, same, same, torch.ones_like(same), same, torch.ones(1, 2).bool(),
        torch.zeros(1, 2, dtype=torch.int64),
    )  # fmt: skip
    losses = BUILTIN["gspo"](inputs, config).token_losses
    (gradient,) = torch.autograd.grad((losses * torch.tensor([[0.0, 1.0]])).sum(), logprobs)
    assert gradient.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize("name", BUILTIN)
def test_tokens_without_an_advantage_get_no_gradient(name):
    assert term_of([3, 0.3, 1], [0, 0, 0], policy_loss=name)[1] == [0, 0, 0]
