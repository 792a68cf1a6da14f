"""Fused log-probabilities equal those of whole logits, and so do their gradients."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.grpo.losses.linear_logprobs import packed_linear_logprobs

TOKENS, VOCAB, DIM = (2, 19), 1031, 16


def inputs(dtype=torch.float32, shape=TOKENS, vocab=VOCAB, scale=1.0, num_others=0):
    """Hidden states, weight, labels, and other ids, among which every second token has its label."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*shape, DIM, generator=generator) * scale
    weight = torch.randn(vocab, DIM, generator=generator)
    labels = torch.randint(0, vocab, shape, generator=generator)
    others = None
    if num_others:
        scores = torch.rand(*shape, vocab, generator=generator)
        scores.scatter_(-1, labels[..., None], -1.0)
        scores[..., ::2, :].scatter_(-1, labels[..., ::2, None], 2.0)
        others = scores.topk(num_others).indices.to(torch.int32)
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    return hidden, weight, labels, others


def scored(case, **changes):
    hidden, weight, labels, others = case
    settings = {"temperature": 0.8, "chunk_tokens": 4, "with_entropy": True} | changes
    return packed_linear_logprobs(hidden, weight, labels, other_ids=others, **settings)


def reference(case, temperature):
    hidden, weight, labels, others = case
    log_p = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    parts = [log_p.gather(-1, labels[..., None]), entropy]
    return torch.cat(parts if others is None else [*parts, log_p.gather(-1, others.long())], dim=-1)


def cotangents(output: torch.Tensor) -> torch.Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def assert_equal_to_reference(case, temperature, chunk_tokens, grad_tolerance=1e-5):
    ours = scored(case, temperature=temperature, chunk_tokens=chunk_tokens)
    theirs = reference(case, temperature)
    assert ours.dtype == torch.float32 and ours.shape == theirs.shape
    assert relative(ours, theirs) < 1e-5
    grads = cotangents(ours)
    found = torch.autograd.grad(ours, case[:2], grads)
    expected = torch.autograd.grad(theirs, case[:2], grads.double())
    for x, y, of in zip(found, expected, case[:2], strict=True):
        assert x.dtype == of.dtype
        assert relative(x, y) < grad_tolerance


@pytest.mark.parametrize("num_others", [0, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_those_of_whole_logits(temperature, num_others):
    for chunk_tokens, scale in itertools.product((1, 7, 10_000), (1.0, 12.0)):
        case = inputs(scale=scale, num_others=num_others)
        assert_equal_to_reference(case, temperature, chunk_tokens)


@pytest.mark.parametrize("num_others", [0, 5])
def test_of_half_precision_inputs_values_are_float32_and_gradients_are_rounded_once(num_others):
    case = inputs(torch.bfloat16, num_others=num_others)
    assert_equal_to_reference(case, 0.9, 3, grad_tolerance=4e-3)
    mixed = inputs(num_others=num_others)
    mixed = (mixed[0], mixed[1].detach().bfloat16().requires_grad_(), *mixed[2:])
    assert_equal_to_reference(mixed, 1.0, 3, grad_tolerance=4e-3)


def test_float64_inputs_have_the_gradient_of_finite_differences():
    case = inputs(torch.float64, (3,), 300, num_others=5)
    assert torch.autograd.gradcheck(
        lambda h, w: scored((h, w, *case[2:]), chunk_tokens=1), case[:2], fast_mode=True
    )


def test_an_entropy_that_is_not_computed_or_not_trained_leaves_the_rest_alone():
    case = inputs()
    trained, without = scored(case), scored(case, with_entropy=False)
    logged = scored(case, trains_entropy=False)
    assert torch.equal(without[..., 0], trained[..., 0]) and not without[..., 1].any()
    assert torch.equal(logged, trained) and logged[..., 1].min() > 0
    grads = cotangents(trained)
    expected = torch.autograd.grad(trained[..., 0], case[:2], grads[..., 0])
    for packed in (without, logged):
        for x, y in zip(torch.autograd.grad(packed, case[:2], grads), expected, strict=True):
            assert relative(x, y) < 1e-6


def test_no_gradient_no_token_and_no_such_label():
    hidden, weight, labels, _ = case = inputs()
    (scored(case, with_entropy=False) * 0).sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()
    with torch.no_grad():
        assert not scored(case).requires_grad
    _, weight, _, _ = nothing = inputs(shape=(0,))
    packed = scored(nothing)
    packed.sum().backward()
    assert packed.shape == (0, 2) and not weight.grad.any()
    labels[0, 1] = VOCAB
    assert scored(case)[0, :3, 0].isneginf().tolist() == [False, True, False]


@pytest.mark.parametrize("frozen", [0, 1], ids=["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen):
    case = inputs()
    grads = cotangents(scored(case))
    expected = torch.autograd.grad(reference(case, 0.8), case[1 - frozen], grads.double())[0]
    case[frozen].requires_grad_(False)
    scored(case).backward(grads)
    assert case[frozen].grad is None
    assert relative(case[1 - frozen].grad, expected) < 1e-5


# ---- other ids beside the label


def test_other_ids_change_no_number_of_the_label_and_cost_no_matrix_product():
    case, flops, found = inputs(num_others=5), [], []
    for others in (None, case[3]):
        with FlopCounterMode(display=False) as counter:
            packed = scored((*case[:3], others))[..., :2]
            found.append((packed, *torch.autograd.grad(packed, case[:2], cotangents(packed))))
        flops.append(counter.get_total_flops())
    assert all_equal(*found)
    assert flops[0] == flops[1] > 0


def test_ids_outside_of_the_vocabulary_are_impossible_and_have_no_gradient():
    case = inputs(num_others=4)
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


# ---- logits kept in the memory of the weight's gradient


def kept_and_computed_again(case, **changes):
    """Outputs and gradients, with logits kept and without."""
    found = []
    for keep_logits in (True, False):
        packed = scored(case, keep_logits=keep_logits, **changes)
        grads = torch.autograd.grad(packed, case[:2], cotangents(packed))
        found.append((packed.detach(), *grads))
    return found


def all_equal(ours, theirs) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@contextmanager
def saving() -> Iterator[list[torch.Tensor]]:
    """What autograd saves."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        yield saved


FLOATS = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize(("hidden_dtype", "weight_dtype"), itertools.product(FLOATS, FLOATS))
def test_kept_logits_give_the_same_bits(hidden_dtype, weight_dtype):
    """More tokens than dims, fewer and as many; slices that fill the vocabulary or do not."""
    for shape, vocab in itertools.product(((2, 19), (3,), (16,)), (1031, 1024, 77)):
        hidden, weight, *ids = inputs(shape=shape, vocab=vocab, num_others=5 * (vocab == 1031))
        hidden = hidden.detach().to(hidden_dtype).requires_grad_()
        weight = weight.detach().to(weight_dtype).requires_grad_()
        for chunk_tokens, with_entropy in itertools.product((1, 4, 10_000), (True, False)):
            settings = {"chunk_tokens": chunk_tokens, "with_entropy": with_entropy}
            assert all_equal(*kept_and_computed_again((hidden, weight, *ids), **settings))


@pytest.mark.parametrize(("shape", "share"), [((3,), 1.0), ((16,), 1.0), ((2, 19), 0.37)])
def test_kept_logits_are_not_computed_again(shape, share):
    """As many as fit: of 38 tokens and 16 dims three of nine slices, 384 of 1,031 ids."""
    case = inputs(shape=shape)
    packed = scored(case, chunk_tokens=1)
    with FlopCounterMode(display=False) as flops:
        torch.autograd.grad(packed, case[:2], cotangents(packed))
    product = 2 * case[2].numel() * VOCAB * DIM
    assert flops.get_total_flops() / product == pytest.approx(3 - share, abs=0.01)


def test_later_passes_over_one_graph_do_without_what_the_first_overwrote():
    hidden, weight, *ids = case = inputs()
    expected = kept_and_computed_again(case)[1][1:]
    packed = scored((hidden * 1, weight, *ids))

    def gradients(*of):
        return torch.autograd.grad(packed, of, cotangents(packed), retain_graph=True)

    assert torch.equal(gradients(hidden)[0], expected[0])
    first = gradients(weight)[0]
    assert torch.equal(first, expected[1])
    first.zero_()
    for _ in range(2):
        assert all_equal(gradients(hidden, weight), expected)
    assert not first.any(), "a later pass wrote into a gradient that was given away"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_keeps_no_logits_and_the_same_numbers(use_reentrant):
    hidden, weight, *ids = case = inputs(num_others=5)
    expected = kept_and_computed_again(case)[1]
    with saving() as saved:
        packed = checkpoint(
            lambda states: scored((states, weight, *ids)), hidden, use_reentrant=use_reentrant
        )
    assert weight.shape not in [x.shape for x in saved]
    packed.backward(cotangents(packed))
    assert all_equal((packed.detach(), hidden.grad, weight.grad), expected)


# Of dynamo itself, which looks at every tensor that it meets.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_around_it_changes_nothing():
    torch._dynamo.reset()
    hidden, weight, *ids = case = inputs()
    expected = kept_and_computed_again(case)[1]
    for keep_logits in (True, False):
        compiled = torch.compile(
            lambda h, w, keep=keep_logits: scored((h, w, *ids), keep_logits=keep) * 1,
            backend="aot_eager",
        )
        packed = compiled(hidden, weight)
        found = torch.autograd.grad(packed, (hidden, weight), cotangents(packed))
        assert all_equal((packed.detach(), *found), expected)


@pytest.mark.parametrize("reason", ["", "no_grad", "frozen weight", "switched off", "no room"])
def test_the_gradient_takes_the_memory_of_logits_which_are_kept_where_it_is_of_use(reason):
    _, weight, _, _ = case = inputs()
    weight.requires_grad_(reason != "frozen weight")
    with torch.set_grad_enabled(reason != "no_grad"), saving() as saved:
        chunk_tokens = 10_000 if reason == "no room" else 1
        packed = scored(case, keep_logits=reason != "switched off", chunk_tokens=chunk_tokens)
    places = {x.data_ptr() for x in saved if x.shape == weight.shape} - {weight.data_ptr()}
    assert len(places) == (not reason)
    if not reason:
        packed.backward(cotangents(packed))
        assert weight.grad.data_ptr() in places


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
        ({"labels": torch.zeros(3).long()}, "labels"),
        ({"weight": torch.zeros(4, DIM + 1)}, "weight must be"),
        ({"other_ids": torch.zeros(2, 18, 5).long()}, r"\(2, 18, 5\) without its last dim"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    hidden, weight, labels, _ = inputs()
    given = {"hidden": hidden, "weight": weight, "labels": labels, "temperature": 1.0}
    given |= {"chunk_tokens": 4, "with_entropy": False} | changes
    with pytest.raises(ValueError, match=message):
        packed_linear_logprobs(**given)


def test_a_vocabulary_sharded_over_ranks_gives_the_whole_ones_numbers(run_ranks):
    """301 ids do not divide; of 4 ids, torch.chunk gives three ranks 2, 2 and none."""
    for result in run_ranks("linear_logprob_ranks", 3, vocabs=[301, 4], temperature=0.8):
        assert len(result["cases"]) == 2
        for case in result["cases"]:
            assert case["same_on_all_ranks"] and case["same_without_keeping"]
            assert max(case["errors"].values()) < 1e-5, case["errors"]
