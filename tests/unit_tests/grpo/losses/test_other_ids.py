# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Further ids of each token get the log-probabilities and gradients that whole logits give."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.grpo.losses.linear_logprobs import packed_linear_logprobs

TOKENS, VOCAB, DIM = (2, 19), 1031, 16


def make_case(dtype=torch.float32, shape=TOKENS, vocab=VOCAB, num_others=5):
    """Hidden states, weight, labels, and other ids among which every second token has its label."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*shape, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, shape, generator=generator)
    scores = torch.rand(*shape, vocab, generator=generator)
    scores.scatter_(-1, labels[..., None], -1.0)
    scores[..., ::2, :].scatter_(-1, labels[..., ::2, None], 2.0)
    others = scores.topk(num_others).indices.to(torch.int32)
    return hidden, weight, labels, others


def reference(hidden, weight, labels, others, temperature):
    log_p = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    label = log_p.gather(-1, labels[..., None])
    return torch.cat((label, entropy, log_p.gather(-1, others.long())), dim=-1)


def scored(case, **changes):
    hidden, weight, labels, others = case
    settings = {"temperature": 0.8, "chunk_tokens": 4, "with_entropy": True} | changes
    return packed_linear_logprobs(hidden, weight, labels, other_ids=others, **settings)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def cotangents(output: torch.Tensor) -> torch.Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)


@pytest.mark.parametrize(
    ("temperature", "chunk_tokens", "dtype", "tolerance"),
    [
        *itertools.product((1.0, 0.6), (1, 7, 10_000), (torch.float32,), (1e-5,)),
        (1.0, 3, torch.bfloat16, 4e-3),
    ],
)
def test_values_and_gradients_equal_those_of_whole_logits(
    temperature, chunk_tokens, dtype, tolerance
):
    case = make_case(dtype)
    ours = scored(case, temperature=temperature, chunk_tokens=chunk_tokens)
    theirs = reference(*case, temperature)
    assert ours.shape == (*TOKENS, 7)
    assert relative(ours, theirs) < 1e-5
    grads = cotangents(ours)
    found = torch.autograd.grad(ours, case[:2], grads)
    expected = torch.autograd.grad(theirs, case[:2], grads.double())
    for x, y in zip(found, expected, strict=True):
        assert relative(x, y) < tolerance


def test_finite_differences_give_the_gradient():
    case = make_case(torch.float64, (3,), 300)
    assert torch.autograd.gradcheck(
        lambda h, w: scored((h, w, *case[2:]), chunk_tokens=1), case[:2], fast_mode=True
    )


def test_the_whole_vocabulary_gives_the_whole_distribution():
    hidden, weight, labels, _ = make_case(vocab=301)
    everything = torch.arange(301).expand(*TOKENS, 301)
    found = scored((hidden, weight, labels, everything), temperature=1.0)[..., 2:]
    torch.testing.assert_close(found, (hidden @ weight.T).log_softmax(-1), rtol=1e-5, atol=1e-5)


def test_label_and_entropy_are_the_same_numbers_without_other_ids():
    case = make_case()
    alone = scored((*case[:3], None))
    assert alone.shape == (*TOKENS, 2)
    together = scored(case)
    assert torch.equal(together[..., :2], alone)
    grads = cotangents(alone)
    expected = torch.autograd.grad(alone, case[:2], grads)
    found = torch.autograd.grad(together[..., :2], case[:2], grads)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_ids_outside_of_the_vocabulary_are_impossible_and_have_no_gradient():
    case = make_case(num_others=4)
    case[3][..., 1], case[3][..., 2], case[3][..., 3] = -1, VOCAB, -1
    output = scored(case)
    assert output[..., 3:].isneginf().all() and output[..., :3].isfinite().all()
    grads = cotangents(output)
    grads[..., 3:] = 0
    found = torch.autograd.grad(output, case[:2], grads)
    inside = scored((*case[:3], case[3][..., :1]))
    expected = torch.autograd.grad(inside, case[:2], grads[..., :3])
    for x, y in zip(found, expected, strict=True):
        assert relative(x, y) < 1e-6


def test_no_matrix_product_is_computed_for_them():
    flops = []
    for others in (None, make_case()[3]):
        hidden, weight, labels, _ = make_case()
        with FlopCounterMode(display=False) as counter:
            scored((hidden, weight, labels, others)).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


def test_kept_logits_and_checkpoints_give_the_same_bits():
    case = make_case()

    def plain(hidden, weight, **changes):
        return scored((hidden, weight, *case[2:]), **changes)

    found = []
    for output in (
        plain(*case[:2]),
        plain(*case[:2], keep_logits=False),
        checkpoint(plain, *case[:2], use_reentrant=False),
    ):
        assert isinstance(output, torch.Tensor)
        found.append((output, *torch.autograd.grad(output.square().sum(), case[:2])))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_other_ids_of_other_tokens_are_refused():
    case = make_case()
    with pytest.raises(ValueError, match=r"other_ids \(2, 18, 5\) without its last dim"):
        scored((*case[:3], case[3][:, :18]))
