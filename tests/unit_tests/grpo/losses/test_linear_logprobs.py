"""Fused log-probabilities equal those of whole logits, and so do their gradients."""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.grpo.losses.linear_logprobs import linear_logprobs, packed_linear_logprobs
from torchtitan.grpo.losses.softmax_slices import KeptLogits, slice_width

TOKENS, VOCAB, DIM = (2, 19), 1031, 16


def reference(hidden, weight, labels, temperature):
    log_p = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, labels[..., None])[..., 0], entropy


def inputs(dtype=torch.float32, shape=TOKENS, vocab=VOCAB, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*shape, DIM, generator=generator) * scale
    weight = torch.randn(vocab, DIM, generator=generator)
    labels = torch.randint(0, vocab, shape, generator=generator)
    grads = torch.randn(2, *shape, generator=generator)
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    return hidden, weight, labels, grads


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def assert_equal_to_reference(case, temperature, chunk_tokens, grad_tolerance=1e-5):
    hidden, weight, labels, grads = case
    ours = linear_logprobs(
        hidden, weight, labels, temperature=temperature, chunk_tokens=chunk_tokens,
        with_entropy=True,
    )  # fmt: skip
    theirs = reference(hidden, weight, labels, temperature)
    our_grads = torch.autograd.grad(ours, (hidden, weight), tuple(grads.to(ours[0].dtype)))
    their_grads = torch.autograd.grad(theirs, (hidden, weight), tuple(grads.double()))
    for x, y in zip(ours, theirs, strict=True):
        assert relative(x, y) < 1e-5
    for x, y, of in zip(our_grads, their_grads, (hidden, weight), strict=True):
        assert x.dtype == of.dtype
        assert relative(x, y) < grad_tolerance


@pytest.mark.parametrize(
    ("temperature", "chunk_tokens", "scale"),
    list(itertools.product((1.0, 0.6), (1, 7, 10_000), (1.0, 12.0))),
)
def test_values_and_gradients_equal_those_of_whole_logits(temperature, chunk_tokens, scale):
    assert_equal_to_reference(inputs(scale=scale), temperature, chunk_tokens)


def test_float64_inputs_are_computed_in_float64():
    hidden, weight, labels, _ = inputs(torch.float64, (3,), 300)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(
            h, w, labels, temperature=0.7, chunk_tokens=1, with_entropy=True
        ),
        (hidden, weight),
        fast_mode=True,
    )


def test_bfloat16_inputs_give_float32_values_and_bfloat16_gradients():
    case = inputs(torch.bfloat16)
    # A gradient is rounded once, to the dtype of its input.
    assert_equal_to_reference(case, 0.9, 3, grad_tolerance=4e-3)


def test_hidden_and_weight_may_differ_in_dtype():
    hidden, weight, labels, grads = inputs()
    weight = weight.detach().bfloat16().requires_grad_()
    assert_equal_to_reference((hidden, weight, labels, grads), 1.0, 3, grad_tolerance=4e-3)


@given(
    tokens=st.integers(1, 40),
    vocab=st.integers(1, 600),
    chunk_tokens=st.integers(1, 50),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_the_chunk_size_changes_nothing(tokens, vocab, chunk_tokens, seed):
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, 5, requires_grad=True)
    weight = torch.randn(vocab, 5, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    results = []
    for size in (chunk_tokens, 10**6):
        packed = packed_linear_logprobs(
            hidden, weight, labels, temperature=1.3, chunk_tokens=size, with_entropy=True
        )
        results.append((packed, *torch.autograd.grad(packed.square().sum(), (hidden, weight))))
    for x, y in zip(*results, strict=True):
        # Sums of terms that may cancel: against the largest of them.
        scale = max(float(y.detach().abs().max()), 1.0)
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * scale)


def test_without_entropy_the_entropy_is_zero_and_logprobs_are_the_same():
    hidden, weight, labels, _ = inputs()
    logprobs, entropy = linear_logprobs(
        hidden, weight, labels, temperature=1.0, chunk_tokens=4, with_entropy=False
    )
    with_entropy, _ = linear_logprobs(
        hidden, weight, labels, temperature=1.0, chunk_tokens=4, with_entropy=True
    )
    assert torch.equal(logprobs, with_entropy)
    assert not entropy.any()
    (logprobs + entropy).sum().backward()
    assert relative(
        hidden.grad, torch.autograd.grad(with_entropy.sum(), hidden)[0]
    ) == pytest.approx(0, abs=1e-7)


def test_an_entropy_that_is_only_logged_leaves_the_gradient_alone():
    hidden, weight, labels, grads = inputs()
    found = []
    for with_entropy in (False, True):
        logprobs, entropy = linear_logprobs(
            hidden, weight, labels, temperature=1.0, chunk_tokens=4, with_entropy=with_entropy
        )
        loss = (logprobs * grads[0]).sum() + 0.0 * entropy.detach().sum()
        found.append(torch.autograd.grad(loss, (hidden, weight)))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_no_gradient_at_all_gives_zeros():
    hidden, weight, labels, _ = inputs()
    logprobs, _ = linear_logprobs(
        hidden, weight, labels, temperature=1.0, chunk_tokens=4, with_entropy=False
    )
    (logprobs * 0).sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_no_tokens_at_all_are_fine():
    hidden, weight, labels, _ = inputs(shape=(0,))
    logprobs, entropy = linear_logprobs(
        hidden, weight, labels, temperature=1.0, chunk_tokens=4, with_entropy=True
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert not weight.grad.any()


def test_a_label_outside_of_the_vocabulary_is_impossible():
    hidden, weight, labels, _ = inputs(shape=(3,))
    labels[1] = VOCAB
    logprobs, _ = linear_logprobs(
        hidden, weight, labels, temperature=1.0, chunk_tokens=4, with_entropy=False
    )
    assert logprobs.isneginf().tolist() == [False, True, False]


def test_an_entropy_that_is_not_trained_has_no_gradient():
    hidden, weight, labels, grads = inputs()
    settings = {"temperature": 1.0, "chunk_tokens": 4, "with_entropy": True}
    logged, entropy = linear_logprobs(hidden, weight, labels, trains_entropy=False, **settings)
    trained, _ = linear_logprobs(hidden, weight, labels, **settings)
    assert entropy.min() > 0
    found = torch.autograd.grad((logged * grads[0] + entropy).sum(), (hidden, weight))
    expected = torch.autograd.grad((trained * grads[0]).sum(), (hidden, weight))
    for x, y in zip(found, expected, strict=True):
        assert relative(x, y) < 1e-6


# ---- logits kept in the memory of the weight's gradient


def scored(case, keep_logits, **changes):
    hidden, weight, labels, _ = case
    settings = {"temperature": 0.8, "chunk_tokens": 4, "with_entropy": True} | changes
    return packed_linear_logprobs(hidden, weight, labels, keep_logits=keep_logits, **settings)


def kept_and_computed_again(case, **changes):
    """Outputs and gradients, with logits kept and without."""
    found = []
    for keep_logits in (True, False):
        packed = scored(case, keep_logits, **changes)
        grads = case[3].movedim(0, -1).to(packed.dtype)
        found.append((packed.detach(), *torch.autograd.grad(packed, case[:2], grads)))
    return found


def all_equal(ours, theirs) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


FLOATS = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype", "shape", "vocab"),
    list(itertools.product(FLOATS, FLOATS, ((2, 19), (3,), (16,)), (1031, 1024, 77))),
)
def test_kept_logits_give_the_same_bits(hidden_dtype, weight_dtype, shape, vocab):
    """More tokens than dims, fewer and as many; slices that fill the vocabulary or do not."""
    hidden, weight, labels, grads = inputs(shape=shape, vocab=vocab)
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    weight = weight.detach().to(weight_dtype).requires_grad_()
    case = (hidden, weight, labels, grads)
    for chunk_tokens, with_entropy in itertools.product((1, 4, 10_000), (True, False)):
        settings = {"chunk_tokens": chunk_tokens, "with_entropy": with_entropy}
        assert all_equal(*kept_and_computed_again(case, **settings))


def test_kept_logits_may_lie_in_a_row_of_odd_length():
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, requires_grad=True)
    weight = torch.randn(301, 5).bfloat16().requires_grad_()
    case = (hidden, weight, torch.randint(0, 301, (7,)), torch.randn(2, 7))
    for chunk_tokens in (1, 3):
        assert all_equal(*kept_and_computed_again(case, chunk_tokens=chunk_tokens))


@pytest.mark.parametrize(("shape", "share"), [((3,), 1.0), ((16,), 1.0), ((2, 19), 0.37)])
def test_kept_logits_are_not_computed_again(shape, share):
    """As many as fit: of 38 tokens and 16 dims three of nine slices, 384 of 1,031 ids."""
    _, _, labels, grads = case = inputs(shape=shape)
    packed = scored(case, True, chunk_tokens=1)
    with FlopCounterMode(display=False) as flops:
        torch.autograd.grad(packed, case[:2], grads.movedim(0, -1))
    product = 2 * labels.numel() * VOCAB * DIM
    assert flops.get_total_flops() / product == pytest.approx(3 - share, abs=0.01)


def test_tokens_without_gradient_are_picked_from_kept_logits():
    """Not to the bit: a product over fewer rows may add in another order."""
    case = inputs()
    case[3][:, 0, 4:] = case[3][:, 1, ::3] = 0
    for ours, theirs in zip(*kept_and_computed_again(case), strict=True):
        assert relative(ours, theirs) < 1e-6
    case[3].zero_()
    assert all_equal(*kept_and_computed_again(case))


def test_later_passes_over_one_graph_do_without_what_the_first_overwrote():
    """For the hidden states, for the weight, and for both twice more."""
    hidden, weight, _, grads = case = inputs()
    grads = grads.movedim(0, -1)
    expected = kept_and_computed_again(case)[1][1:]
    packed = scored((hidden * 1, *case[1:]), True)

    def gradients(*of):
        return torch.autograd.grad(packed, of, grads, retain_graph=True)

    assert torch.equal(gradients(hidden)[0], expected[0])
    first = gradients(weight)[0]
    assert torch.equal(first, expected[1])
    first.zero_()
    for _ in range(2):
        assert all_equal(gradients(hidden, weight), expected)
    assert not first.any(), "a later pass wrote into a gradient that was given away"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_keeps_no_logits_and_the_same_numbers(use_reentrant):
    hidden, weight, labels, grads = case = inputs()
    expected = kept_and_computed_again(case)[1]

    def score(states):
        return scored((states, weight, labels, grads), True)

    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.shape) or x, lambda x: x
    ):
        sizes: list[torch.Size] = []
        packed = checkpoint(score, hidden, use_reentrant=use_reentrant)
    assert weight.shape not in sizes
    packed.backward(grads.movedim(0, -1))
    assert all_equal((packed.detach(), hidden.grad, weight.grad), expected)


# Of dynamo itself, which looks at every tensor that it meets.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_around_it_changes_nothing():
    torch._dynamo.reset()
    hidden, weight, labels, grads = case = inputs()
    expected = kept_and_computed_again(case)[1]
    for keep_logits in (True, False):
        compiled = torch.compile(
            lambda h, w, keep=keep_logits: scored((h, w, labels, grads), keep) * 1,
            backend="aot_eager",
        )
        packed = compiled(hidden, weight)
        found = torch.autograd.grad(packed, (hidden, weight), grads.movedim(0, -1))
        assert all_equal((packed.detach(), *found), expected)


@pytest.mark.parametrize("reason", ["no_grad", "frozen weight", "switched off", "no room"])
def test_nothing_is_kept_where_it_is_of_no_use(reason):
    _, weight, _, _ = case = inputs()
    weight.requires_grad_(reason != "frozen weight")
    saved: list[torch.Tensor] = []
    with (
        torch.set_grad_enabled(reason != "no_grad"),
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        chunk_tokens = 10_000 if reason == "no room" else 1
        scored(case, reason != "switched off", chunk_tokens=chunk_tokens)
    of_weight_shape = {x.data_ptr() for x in saved if x.shape == weight.shape}
    assert of_weight_shape <= {weight.data_ptr()}


def test_the_gradient_takes_the_memory_of_the_kept_logits():
    _, weight, _, grads = case = inputs()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        packed = scored(case, True, chunk_tokens=1)
    places = {x.data_ptr() for x in saved if x.shape == weight.shape} - {weight.data_ptr()}
    assert len(places) == 1
    packed.backward(grads.movedim(0, -1))
    assert weight.grad.data_ptr() in places


def test_logits_are_kept_where_no_gradient_is_written_before_they_are_read():
    for tokens, dim, vocab, chunk_tokens, dtype in itertools.product(
        (1, 5, 40), (4, 24), (100, 1000), (1, 3), (torch.float32, torch.bfloat16)
    ):
        width = slice_width(tokens, vocab, chunk_tokens)
        memory = torch.empty(vocab, dim, dtype=dtype)
        kept, end = KeptLogits(memory, tokens, width, torch.float32), 0
        for start in range(0, vocab, width):
            logits = kept.find(start)
            if logits is not None:
                begin = logits.data_ptr() - memory.data_ptr()
                assert begin % 64 == 0
                assert begin >= max(end, start * dim * dtype.itemsize)
                end = begin + logits.numel() * 4
        assert end <= memory.numel() * dtype.itemsize


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen):
    hidden, weight, labels, grads = inputs()
    expected = reference(hidden, weight, labels, 1.0)[0]
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    other = weight if frozen == "hidden" else hidden
    logprobs, _ = linear_logprobs(
        hidden, weight, labels, temperature=1.0, chunk_tokens=4, with_entropy=False
    )
    (logprobs * grads[0]).sum().backward()
    assert (hidden if frozen == "hidden" else weight).grad is None
    assert relative(other.grad, torch.autograd.grad(expected, other, grads[0].double())[0]) < 1e-5


def test_without_gradients_nothing_is_recorded():
    hidden, weight, labels, _ = inputs()
    with torch.no_grad():
        logprobs, _ = linear_logprobs(
            hidden, weight, labels, temperature=1.0, chunk_tokens=4, with_entropy=False
        )
    assert not logprobs.requires_grad


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(use_reentrant):
    hidden, weight, labels, grads = inputs()

    def score(states):
        return packed_linear_logprobs(
            states.tanh(), weight, labels, temperature=1.0, chunk_tokens=4, with_entropy=True
        )

    found = []
    for packed in (score(hidden), checkpoint(score, hidden, use_reentrant=use_reentrant)):
        packed.backward(grads.movedim(0, -1))
        found.append((packed.detach(), hidden.grad, weight.grad))
        hidden.grad = weight.grad = None
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "labels"),
        ({"weight": torch.zeros(4, DIM + 1)}, "weight must be"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    hidden, weight, labels, _ = inputs()
    given = {"hidden": hidden, "weight": weight, "labels": labels, "temperature": 1.0}
    given |= {"chunk_tokens": 4, "with_entropy": False} | changes
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**given)


@pytest.mark.parametrize(("num_ranks", "vocabs"), [(2, [301]), (3, [301, 4])])
def test_a_vocabulary_sharded_over_ranks_gives_the_whole_ones_numbers(num_ranks, vocabs, run_ranks):
    """301 ids do not divide; of 4 ids, torch.chunk gives three ranks 2, 2 and none."""
    for result in run_ranks("linear_logprob_ranks", num_ranks, vocabs=vocabs, temperature=0.8):
        assert len(result["cases"]) == len(vocabs)
        for case in result["cases"]:
            assert case["same_on_all_ranks"] and case["same_without_keeping"]
            assert max(case["errors"].values()) < 1e-5, case["errors"]


@pytest.mark.long
def test_the_memory_benchmark_ends_with_one_json_object(repository, rank_environment):
    """Small, so that its bounds say nothing; that all rows agree on the numbers does."""
    result = subprocess.run(
        [sys.executable, repository / "benchmarks/logprob_memory.py", "--quick", "--json"]
        + ["--rounds", "1"],
        env=rank_environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode in (0, 1), result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["benchmark"] == "logprob_memory" and isinstance(found["ok"], bool)
    assert found["ok"] == (result.returncode == 0)
    assert all(isinstance(figure, float) for figure in found["figures"].values())
    for name in ("naive", "fused", "fused_entropy", "torch", "torch_chunked"):
        assert found["figures"][f"{name}_difference"] < 1e-4
        assert found["figures"][f"{name}_memory_ratio"] > 0
