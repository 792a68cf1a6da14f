"""Attention of packed rows stays inside each sequence, whichever kernel computes it."""

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_mask, flex_attention
from varlen_kernel import dense_varlen, dense_varlen_backward

from torchtitan.grpo.models import tree_attention
from torchtitan.grpo.models.packed_attention import (
    DenseMask,
    HostReach,
    PackedAttention,
    packed_mask,
)

# Two rows. A context of two tokens is seen by three sequences, two of which share one more token;
# another row begins with a sequence that shares nothing. Each row has padding at its end.
REACH = torch.tensor([[8, 8, 4, 4, 8, 6, 8, 8, 10, 10], [3, 3, 3, 8, 5, 8, 8, 8, 10, 10]])
SEEN_BY = {
    (0, 0): range(8),
    (0, 4): (4, 5, 6, 7),
    (1, 3): range(3, 8),
    (1, 4): (4,),
    (1, 5): (5, 6, 7),
}


@pytest.fixture
def _eager() -> Iterator[None]:
    """What makes a block mask is compiled, which takes half a minute and changes nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def varlen(monkeypatch) -> Iterator[None]:
    """Lets :func:`dense_varlen` stand for torch's function, which needs a GPU."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", dense_varlen)
    monkeypatch.setattr(tree_attention, "_backward_kernel", lambda: dense_varlen_backward)
    yield


def visible(reach: torch.Tensor) -> torch.Tensor:
    """[rows, seq, seq] bool, spelled out: which keys each query sees."""
    rows, seq = reach.tolist(), range(reach.shape[1])
    return torch.tensor([[[k <= q < row[k] for k in seq] for q in seq] for row in rows])


def some_reach(seed: int, rows: int, seq: int, *, shared: bool = True) -> torch.Tensor:
    """Returns the reach of rows that are packed at random, with trees of several levels."""
    chooser = random.Random(seed)
    share = chooser.choice((0.01, 0.05, 0.3, 0.9))

    def fill(begin: int, end: int, depth: int) -> list[int]:
        """The reach of tokens [begin, end), which are the subtrees of one context or of none."""
        found = []
        while begin < end:
            length = min(end - begin, 1 + int(chooser.expovariate(share)))
            branches = shared and depth < 3 and length > 2 and chooser.random() < 0.7
            own = chooser.randrange(1, length - 1) if branches else length
            found += [begin + length] * own
            if branches:  # two or more below, of which the first does not fill all of it
                first = begin + own + chooser.randrange(1, length - own)
                found += [first] * (first - begin - own) + fill(first, begin + length, depth + 1)
            begin += length
        return found

    return torch.tensor([fill(0, seq, 0) for _ in range(rows)])


def heads(rows: int, seq: int, q_heads: int, kv_heads: int, dtype=torch.float64) -> list:
    """Returns queries, keys and values, [rows, heads, seq, 16], with the strides of upstream's."""
    shapes = [(rows, seq, number, 16) for number in (q_heads, kv_heads, kv_heads)]
    made = [torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes]
    return [tensor.requires_grad_() for tensor in made]


def attend(kind, reach, inputs, scale=None, **of_mask):
    """Returns the output, and the gradients of a sum that weighs each of its numbers."""
    mask = packed_mask(reach, kind, HostReach(reach), **of_mask)
    return with_gradients(PackedAttention()(*inputs, mask, scale), inputs)


def with_gradients(out, inputs):
    if not out.requires_grad:
        return (out,)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.usefixtures("_eager")
def test_every_kind_of_mask_lets_a_token_see_its_own_past_and_shared_contexts():
    rows, seq = REACH.shape
    expected = visible(REACH)
    for (row, key), queries in SEEN_BY.items():
        assert expected[row, :, key].nonzero().flatten().tolist() == list(queries)
    dense = packed_mask(REACH, "sdpa")
    assert isinstance(dense, DenseMask)
    assert torch.equal(dense.dense[:, 0], expected)
    flex = packed_mask(REACH, "flex")
    found = create_mask(flex.mask_mod, rows, 1, seq, seq, device="cpu")
    assert torch.equal(found[:, 0], expected)


# Places in their sequences of the tokens of REACH: what follows a shared context counts on from it.
POSITIONS = torch.tensor([[0, 1, 2, 3, 2, 3, 3, 4, 0, 1], [0, 1, 2, 0, 1, 1, 2, 3, 0, 1]])


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("kind", ["sdpa", "flex", "varlen"])
def test_a_window_counts_positions_in_a_sequence_and_not_places_in_a_row(kind):
    rows, seq = REACH.shape
    behind = POSITIONS[:, :, None] - POSITIONS[:, None, :]
    expected = visible(REACH) & (behind < 2)
    mask = packed_mask(REACH, kind, window=2, positions=POSITIONS)
    if kind == "flex":
        found = create_mask(mask.mask_mod, rows, 1, seq, seq, device="cpu")
    else:
        assert isinstance(mask, DenseMask), "varlen's calls for shared contexts have no window"
        found = mask.dense
    assert torch.equal(found[:, 0], expected)
    whole = packed_mask(REACH, "sdpa", window=seq, positions=POSITIONS)
    assert torch.equal(whole.dense[:, 0], visible(REACH)), "no row is longer than the window"


@pytest.mark.usefixtures("varlen")
def test_varlen_has_the_window_of_the_dense_mask_where_nothing_is_shared():
    reach = some_reach(3, 2, 60, shared=False)
    positions = torch.stack([
        torch.cat([torch.arange(n) for n in row.unique_consecutive(return_counts=True)[1]])
        for row in reach
    ])  # fmt: skip
    q, k, v = heads(2, 60, 4, 2, torch.float32)
    found = [
        PackedAttention()(
            q, k, v, packed_mask(reach, kind, may_share=False, window=5, positions=positions)
        )
        for kind in ("varlen", "sdpa")
    ]
    torch.testing.assert_close(*found)


def spelled_out(q, k, v, sees):
    """Attention of [rows, heads, seq, 16] with a mask [rows, seq, seq], without a function of torch's."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    weights = (q @ k.transpose(2, 3) / 4).exp() * sees[:, None]
    return weights / weights.sum(-1, keepdim=True) @ v


# Rows of 40 tokens, one of which is a single sequence: a window of 39 hides one token from one other.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("_eager", "varlen")
@pytest.mark.parametrize("window", [1, 2, 5, 39, 40, 41])
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("kind", ["sdpa", "flex", "varlen"])
def test_every_kernel_has_the_window_that_is_spelled_out(kind, shared, window):
    torch.manual_seed(window)
    packed = [some_reach(seed, 1, 40, shared=shared) for seed in range(3)]
    reach = torch.cat([*packed, torch.full((1, 40), 40)])
    assert bool((reach[:, :-1] > reach[:, 1:]).any()) == shared
    sees = visible(reach)
    positions = sees.sum(-1) - 1  # what a token sees without a window is its sequence up to itself
    sees &= positions[:, :, None] - positions[:, None, :] < window
    assert bool((sees.sum(-1) == 1).all()) == (window == 1)
    assert bool(sees[-1, -1, 0]) == (window >= 40)
    inputs = heads(4, 40, 6, 2)
    if kind == "flex":  # whose gradients need a GPU
        inputs = [tensor.detach() for tensor in inputs]
    of_mask = {"window": window, "positions": positions, "may_share": shared}
    found = attend(kind, reach, inputs, **of_mask)
    for one, expected in zip(
        found, with_gradients(spelled_out(*inputs, sees), inputs), strict=True
    ):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_borders_are_those_of_the_spans_however_rows_are_packed(seed):
    rows, seq = 1 + seed % 3, 1 + 37 * seed % 300
    reach = some_reach(seed, rows, seq)
    mask = packed_mask(reach, "varlen", HostReach(reach))
    lengths = [length for row in reach for length in row.unique_consecutive(return_counts=True)[1]]
    begins = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    found = mask.borders.tolist()
    assert found[: len(begins)] == begins
    assert set(found[len(begins) :]) <= {reach.numel()}
    assert len(found) % 8 == 0 and len(found) < len(begins) + 8
    assert max(lengths) <= mask.longest < max(lengths) + 128 and mask.longest % 128 == 0


def test_levels_hold_each_context_with_the_tokens_that_see_it():
    shared = packed_mask(REACH, "varlen").shared
    first, second = shared.levels
    assert first.keys.tolist() == [0, 1, 13]
    assert first.queries.tolist() == [*range(2, 8), *range(14, 18)]
    assert (first.key_borders.tolist(), first.query_borders.tolist()) == ([0, 2, 3], [0, 6, 10])
    assert (second.keys.tolist(), second.queries.tolist()) == ([4], [5, 6, 7])
    assert shared.sizes.tolist() == [[10, 3, 6, 2], [3, 1, 3, 1]]
    assert packed_mask(some_reach(0, 2, 50, shared=False), "varlen").shared is None


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize("seed", range(8))
def test_varlen_and_the_dense_mask_are_the_same_attention(seed):
    torch.manual_seed(seed)
    rows, seq, scale = 1 + seed % 3, 2 + 29 * seed % 150, (None, 0.3)[seed % 2]
    reach = some_reach(seed, rows, seq, shared=seed != 5)
    inputs = heads(rows, seq, 4, (4, 2, 1)[seed % 3])
    dense = attend("sdpa", reach, inputs, scale)
    for found, expected in zip(attend("varlen", reach, inputs, scale), dense, strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# Outside of torch.compile the flex kernel says that it is slow.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("_eager")
def test_the_flex_kernel_computes_what_the_dense_mask_computes():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, number, 10, 16) for number in (4, 2, 2))
    attention = PackedAttention()
    dense = attention(q, k, v, packed_mask(REACH, "sdpa"))
    mask = packed_mask(REACH, "flex")
    flex = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(flex, dense)


ALONE = torch.tensor([[3, 3, 3, 5, 5, 10, 10, 10, 10, 10], [1, 6, 6, 6, 6, 6, 10, 10, 10, 10]])


@pytest.mark.parametrize("reach", [REACH, ALONE], ids=["shared", "alone"])
def test_torch_s_own_varlen_functions_are_traced_with_their_gradients(reach):
    """Whatever this version of torch calls its arguments; its kernels themselves run on GPUs alone."""
    attention, host = PackedAttention(), HostReach(reach)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        mask = packed_mask(mode.from_tensor(reach), "varlen", host)
        inputs = heads(2, 10, 4, 2, torch.bfloat16)
        out = attention(*inputs, mask)
        # What follows in upstream's model: no copy is made.
        assert out.transpose(1, 2).is_contiguous()
        out.sum().backward()
    assert out.shape == inputs[0].shape and out.dtype == torch.bfloat16
    assert all(t.grad is not None and t.grad.shape == t.shape for t in inputs)


@pytest.mark.parametrize(
    ("reach", "operator"),
    [(REACH, "torchtitan_grpo.attend_to_tree"), (ALONE, "torch_attn._varlen_attn")],
    ids=["shared", "alone"],
)
def test_the_varlen_operators_are_part_of_a_compiled_block(reach, operator):
    graphs = []
    backend = aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or graph)
    compiled = torch.compile(PackedAttention(), backend=backend, fullgraph=True)
    mask = packed_mask(reach, "varlen")
    with pytest.raises(NotImplementedError, match=r"_flash_attention_forward.*'CPU'"):
        compiled(*heads(2, 10, 4, 2, torch.bfloat16), mask)
    torch._dynamo.reset()
    (forward,) = graphs
    called = {str(node.target) for node in forward.graph.nodes if node.op == "call_function"}
    assert f"{operator}.default" in called
    copies = {"aten.clone.default", "aten.copy.default", "aten._to_copy.default"}
    assert not called & copies


@pytest.mark.usefixtures("varlen")
def test_other_spans_do_not_compile_a_block_again_and_again(monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", dense_varlen)
    compiled = torch.compile(PackedAttention(), backend=counter, fullgraph=True)
    torch.manual_seed(0)
    q, k, v = heads(2, 300, 4, 2)

    def check(reach: torch.Tensor) -> None:
        found = compiled(q, k, v, packed_mask(reach, "varlen", compiled=True))
        expected = PackedAttention()(q, k, v, packed_mask(reach, "sdpa"))
        torch.testing.assert_close(found, expected)

    def rows_of(tokens: int) -> torch.Tensor:  # of a sequence, and the rest of a row
        return ((torch.arange(300) // tokens + 1) * tokens).clamp(max=300).expand(2, 300)

    def shared(tokens: int) -> torch.Tensor:  # of a context, which two sequences see
        reach = torch.full((300,), 300)
        reach[tokens : tokens + 20] = tokens + 20
        return reach.expand(2, 300)

    def nested(depth: int) -> torch.Tensor:  # each context has a sequence and the next context
        reach = torch.full((300,), 300)
        for number in range(depth):
            reach[20 * number + 10 : 20 * number + 20] = 20 * number + 20
        return reach.expand(2, 300)

    shapes = [*map(rows_of, (300, 299, 150, 128, 64, 17, 10)), *map(shared, (1, 5, 200))]
    for reach in (*shapes, *map(nested, range(5))):
        check(reach)
    assert counter.frame_count == 1
    for tokens in (9, 3, 1):
        check(rows_of(tokens))
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_on_a_gpu_a_dense_mask_does_not_exclude_the_memory_efficient_kernel(monkeypatch):
    calls = []

    def recorded(q, k, v, *, attn_mask, scale, enable_gqa):
        calls.append((q.shape[1], k.shape[1], v.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    with FakeTensorMode():
        for device in ("cuda", "cpu"):
            q = torch.empty(1, 4, 8, 16, device=device)
            k = torch.empty(1, 2, 8, 16, device=device)
            mask = DenseMask(torch.empty(1, 1, 8, 8, dtype=torch.bool, device=device))
            PackedAttention()(q, k, k, mask)
    assert calls == [(4, 4, 4, False), (4, 2, 2, True)]
