"""Attention of packed rows stays inside each sequence, whichever kernel computes it."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from torchtitan.grpo.models.packed_attention import (
    DenseMask,
    PackedAttention,
    choose_packed_attention,
    packed_mask,
)

# Two rows, each with padding at its end, which has an id of its own.
SEQUENCE_IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2]])


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Upstream compiles what makes a block mask, which takes half a minute and changes nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


def visible() -> torch.Tensor:
    """[rows, seq, seq] bool, spelled out: a query sees itself and what came before of its own."""
    rows, seq = SEQUENCE_IDS.shape
    return torch.tensor(
        [
            [
                [k <= q and SEQUENCE_IDS[row, k] == SEQUENCE_IDS[row, q] for k in range(seq)]
                for q in range(seq)
            ]
            for row in range(rows)
        ]
    )


def test_both_kinds_of_mask_let_a_token_see_its_own_past_alone():
    rows, seq = SEQUENCE_IDS.shape
    dense = packed_mask(SEQUENCE_IDS, "sdpa")
    assert isinstance(dense, DenseMask)
    assert torch.equal(dense.dense[:, 0], visible())
    flex = packed_mask(SEQUENCE_IDS, "flex")
    found = create_mask(flex.mask_mod, rows, 1, seq, seq, device="cpu")
    assert torch.equal(found[:, 0], visible())


# Outside of torch.compile the flex kernel says that it is slow.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_flex_kernel_computes_what_the_dense_mask_computes():
    torch.manual_seed(0)
    q = torch.randn(2, 4, 8, 16)
    k, v = torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    attention = PackedAttention("sdpa")
    dense = attention(q, k, v, block_mask=packed_mask(SEQUENCE_IDS, "sdpa"), enable_gqa=True)
    mask = packed_mask(SEQUENCE_IDS, "flex")
    flex = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(flex, dense)


def test_another_sequence_of_the_row_changes_nothing():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
    mask = packed_mask(SEQUENCE_IDS, "sdpa")
    attention = PackedAttention("sdpa")
    before = attention(q, k, v, block_mask=mask)
    k[0, :, :3], v[0, :, :3] = 100.0, 100.0
    after = attention(q, k, v, block_mask=mask)
    assert torch.equal(before[0, :, 3:], after[0, :, 3:])
    assert not torch.equal(before[0, :, :3], after[0, :, :3])


@pytest.mark.parametrize(
    ("setting", "device", "seq_len", "kind"),
    [
        ("auto", "cuda", 2048, "flex"),
        ("auto", "cuda", 2047, "sdpa"),
        ("auto", "cpu", 4096, "sdpa"),
        ("flex", "cuda", 16, "flex"),
        ("sdpa", "cuda", 4096, "sdpa"),
    ],
)
def test_long_rows_on_a_gpu_use_flex_unless_told_otherwise(setting, device, seq_len, kind):
    assert choose_packed_attention(setting, device, seq_len) == kind
