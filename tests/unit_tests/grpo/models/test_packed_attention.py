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
from varlen_kernel import dense_varlen

from torchtitan.grpo.models import packed_attention
from torchtitan.grpo.models.packed_attention import (
    DenseMask,
    HostSequences,
    PackedAttention,
    packed_mask,
)

# Two rows, each with padding at its end, which has an id of its own.
SEQUENCE_IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2]])


@pytest.fixture
def _eager() -> Iterator[None]:
    """What makes a block mask is compiled, which takes half a minute and changes nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def varlen(monkeypatch) -> Iterator[None]:
    """Lets :func:`exact_varlen` stand for torch's function, which needs a GPU."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", exact_varlen)
    packed_attention._causal_varlen_attn.cache_clear()
    yield
    packed_attention._causal_varlen_attn.cache_clear()


def exact_varlen(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """Computes what torch's function documents, each sequence by itself, in float64.

    Beyond ``max_q`` the kernel computes nothing, so that a bound which is too small leaves NaN.
    """
    assert window_size == (-1, 0)
    assert enable_gqa or q.shape[1] == k.shape[1]
    for cu_seq in (cu_seq_q, cu_seq_k):
        assert cu_seq.dtype == torch.int32
        assert cu_seq[0] == 0 and cu_seq[-1] == len(q)
    outputs = [q.new_zeros(0, *q.shape[1:])]
    for begin, end in zip(cu_seq_q.tolist()[:-1], cu_seq_q.tolist()[1:], strict=True):
        one = [t[begin:end].transpose(0, 1).double() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*one, is_causal=True, scale=scale, enable_gqa=True)
        out = out.transpose(0, 1).to(q.dtype)
        computed = torch.arange(end - begin) < min(max_q, max_k)
        outputs.append(torch.where(computed[:, None, None], out, torch.nan))
    return torch.cat(outputs)


def visible(ids: torch.Tensor) -> torch.Tensor:
    """[rows, seq, seq] bool, spelled out: a query sees itself and what came before of its own."""
    rows, seq = ids.tolist(), range(ids.shape[1])
    return torch.tensor([[[k <= q and row[k] == row[q] for k in seq] for q in seq] for row in rows])


def some_ids(seed: int, rows: int, seq: int) -> torch.Tensor:
    """Returns sequence ids of rows that are packed at random."""
    chooser = random.Random(seed)
    share = chooser.choice((0.0, 0.05, 0.3, 1.0))
    begins = [[chooser.random() < share for _ in range(seq)] for _ in range(rows)]
    return torch.tensor(begins).cumsum(1)


def heads(rows: int, seq: int, q_heads: int, kv_heads: int, dtype=torch.float64) -> list:
    """Returns queries, keys and values, [rows, heads, seq, 16], with the strides of upstream's."""
    shapes = [(rows, seq, number, 16) for number in (q_heads, kv_heads, kv_heads)]
    made = [torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes]
    return [tensor.requires_grad_() for tensor in made]


def attend(kind, ids, inputs, scale=None):
    """Returns the output, and the gradients of a sum that weighs each of its numbers."""
    grouped = inputs[0].shape[1] != inputs[1].shape[1]
    mask = packed_mask(ids, kind, HostSequences(ids))
    out = PackedAttention(kind)(*inputs, block_mask=mask, scale=scale, enable_gqa=grouped)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.usefixtures("_eager")
def test_every_kind_of_mask_lets_a_token_see_its_own_past_alone():
    rows, seq = SEQUENCE_IDS.shape
    dense = packed_mask(SEQUENCE_IDS, "sdpa")
    assert isinstance(dense, DenseMask)
    assert torch.equal(dense.dense[:, 0], visible(SEQUENCE_IDS))
    flex = packed_mask(SEQUENCE_IDS, "flex")
    found = create_mask(flex.mask_mod, rows, 1, seq, seq, device="cpu")
    assert torch.equal(found[:, 0], visible(SEQUENCE_IDS))


@pytest.mark.parametrize("seed", range(6))
def test_borders_are_those_of_the_ids_however_rows_are_packed(seed):
    rows, seq = 1 + seed % 3, 1 + 37 * seed % 300
    ids = some_ids(seed, rows, seq)
    mask = packed_mask(ids, "varlen", HostSequences(ids))
    lengths = [length for row in ids for length in row.unique_consecutive(return_counts=True)[1]]
    begins = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    found = mask.borders.tolist()
    assert found[: len(begins)] == begins
    assert set(found[len(begins) :]) <= {ids.numel()}
    assert len(found) % 8 == 0 and len(found) < len(begins) + 8
    assert max(lengths) <= mask.longest < max(lengths) + 128 and mask.longest % 128 == 0
    assert HostSequences(ids).count_and_longest() == (len(lengths), max(lengths))


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize("seed", range(8))
def test_varlen_and_the_dense_mask_are_the_same_attention(seed):
    torch.manual_seed(seed)
    rows, seq, scale = 1 + seed % 3, 2 + 29 * seed % 150, (None, 0.3)[seed % 2]
    ids, inputs = some_ids(seed, rows, seq), heads(rows, seq, 4, (4, 2, 1)[seed % 3])
    dense = attend("sdpa", ids, inputs, scale)
    for found, expected in zip(attend("varlen", ids, inputs, scale), dense, strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# Outside of torch.compile the flex kernel says that it is slow.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("_eager")
def test_the_flex_kernel_computes_what_the_dense_mask_computes():
    torch.manual_seed(0)
    q = torch.randn(2, 4, 8, 16)
    k, v = torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    attention = PackedAttention("sdpa")
    dense = attention(q, k, v, block_mask=packed_mask(SEQUENCE_IDS, "sdpa"), enable_gqa=True)
    mask = packed_mask(SEQUENCE_IDS, "flex")
    flex = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(flex, dense)


def test_torch_s_own_varlen_function_is_traced_with_its_gradients():
    """Whatever this version of torch calls its arguments; its kernel itself runs on GPUs alone."""
    attention, host = PackedAttention("varlen"), HostSequences(SEQUENCE_IDS)
    with FakeTensorMode() as mode:
        mask = packed_mask(mode.from_tensor(SEQUENCE_IDS), "varlen", host)
        inputs = heads(2, 8, 4, 2, torch.bfloat16)
        out = attention(*inputs, block_mask=mask, enable_gqa=True)
        # What follows in upstream's model: no copy is made.
        assert out.transpose(1, 2).is_contiguous()
        out.sum().backward()
    assert out.shape == inputs[0].shape and out.dtype == torch.bfloat16
    assert all(t.grad is not None and t.grad.shape == t.shape for t in inputs)


def test_torch_s_own_varlen_function_is_part_of_a_compiled_block():
    graphs = []
    backend = aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or graph)
    compiled = torch.compile(PackedAttention("varlen"), backend=backend, fullgraph=True)
    mask = packed_mask(SEQUENCE_IDS, "varlen")
    with pytest.raises(NotImplementedError, match=r"_flash_attention_forward.*'CPU'"):
        compiled(*heads(2, 8, 4, 2, torch.bfloat16), block_mask=mask, enable_gqa=True)
    torch._dynamo.reset()
    (forward,) = graphs
    called = {str(node.target) for node in forward.graph.nodes if node.op == "call_function"}
    assert "torch_attn._varlen_attn.default" in called
    copies = {"aten.clone.default", "aten.copy.default", "aten._to_copy.default"}
    assert not called & copies


@pytest.mark.usefixtures("varlen")
def test_other_borders_do_not_compile_a_block_again_and_again(monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", dense_varlen)
    compiled = torch.compile(PackedAttention("varlen"), backend=counter, fullgraph=True)
    torch.manual_seed(0)
    q, k, v = heads(2, 300, 4, 2)

    def check(ids: torch.Tensor) -> None:
        found = compiled(q, k, v, block_mask=packed_mask(ids, "varlen", compiled=True))
        expected = PackedAttention("sdpa")(q, k, v, block_mask=packed_mask(ids, "sdpa"))
        torch.testing.assert_close(found, expected)

    for tokens in (300, 299, 150, 128, 64, 17, 10):  # of a sequence, and the rest of a row
        check((torch.arange(300) // tokens).expand(2, 300))
    assert counter.frame_count == 1
    for tokens in (9, 3, 1):
        check((torch.arange(300) // tokens).expand(2, 300))
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
            PackedAttention("sdpa")(q, k, k, block_mask=mask, enable_gqa=True)
    assert calls == [(4, 4, 4, False), (4, 2, 2, True)]
