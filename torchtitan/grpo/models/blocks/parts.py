# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A row (dataclass) for each kind of block: what the rest of the package knows of it. Torch is not imported.

With hidden size h, query width q, key width k, feed-forward width f and bytes b of
``training.mixed_precision_param``, a layer of Llama or Qwen3 keeps for each token

    none        b * (4h + 3q + 3k + 4f)
    op          b * (2h + 2q + k + f): every second matrix product, the attention's output and the input;
                with biases of queries, keys and values b * (2h + q + f)
    full        b * h, its input

as in https://arxiv.org/abs/2205.05198. Without norms of queries and keys, subtract one q and one k. An expert
counts only for the tokens that it receives. Compiled blocks keep less, so that these are upper bounds.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Part:
    """A weight of a layer.

    Attributes:
        name: The module's name in the layer, such as ``attention.wq``. For stacked experts, the parameter's.
        disk: The module's name in the layer, in files and on servers. Experts that are stacked here are
            separate modules there, with ``{}`` for the number of the expert.
        shape: [out, in] of a linear layer, [width] of a norm, [experts, out, in] of stacked experts.
        cut: The dimension that tensor parallelism divides; None if every rank holds the weight whole.
        has_bias: Whether a bias [out] belongs to it, which is divided as the outputs are.
        norms: What a norm normalizes: hidden states, or the heads of a token. Empty if it is no norm.
        is_target: Whether LoRA may wrap it.
    """

    name: str
    disk: str
    shape: tuple[int, ...]
    cut: int | None = None
    has_bias: bool = False
    norms: Literal["", "hidden", "heads"] = ""
    is_target: bool = False

    @property
    def is_linear(self) -> bool:
        return len(self.shape) == 2

    @property
    def is_stacked(self) -> bool:
        return len(self.shape) > 2

    @property
    def target(self) -> str:
        """The part's name in ``lora.target_modules``."""
        return self.disk.rpartition(".")[2]

    @property
    def names(self) -> Iterator[tuple[str, str]]:
        """Yields each parameter's name in the layer, with its name in the layer on disk."""
        if self.is_stacked:
            yield self.name, f"{self.disk}.weight"
            return
        yield f"{self.name}.weight", f"{self.disk}.weight"
        if self.has_bias:
            yield f"{self.name}.bias", f"{self.disk}.bias"


def linear(
    name: str, disk: str, shape: tuple[int, int], cut: int | None, *, has_bias: bool = False
) -> Part:
    return Part(name, disk, shape, cut, has_bias, is_target=True)


@dataclass(frozen=True)
class GroupedAttention:
    """Grouped-query attention (https://arxiv.org/abs/2305.13245).

    The mask is causal. With a ``window``, a token sees at most that many tokens, itself included.
    ``has_bias`` says whether the projections to queries, keys and values have biases.
    """

    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool = False
    has_bias: bool = False
    window: int | None = None

    @property
    def heads(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return self.head_dim

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order in which they are used."""
        q, kv, bias = (self.heads, self.dim), (self.kv_heads, self.dim), self.has_bias
        of_heads = [
            Part(f"attention.{x}_norm", f"self_attn.{x}_norm", (self.head_dim,), norms="heads")
            for x in "qk"
        ]
        return (
            linear("attention.wq", "self_attn.q_proj", q, 0, has_bias=bias),
            linear("attention.wk", "self_attn.k_proj", kv, 0, has_bias=bias),
            linear("attention.wv", "self_attn.v_proj", kv, 0, has_bias=bias),
            *(of_heads if self.has_qk_norm else ()),
            linear("attention.wo", "self_attn.o_proj", (self.dim, self.heads), 1),
        )

    before = tuple(f"attention.{name}" for name in ("wq", "wk", "wv", "q_norm", "k_norm"))
    after = ("attention.wo",)
    """Parts, if it has them, before and after the kernel, which Helix computes on another rank."""

    @property
    def divided_heads(self) -> tuple[int, int]:
        """Numbers of query heads and of key-value heads, which tensor and context parallelism divide."""
        return self.num_heads, self.num_kv_heads

    @property
    def pair_products(self) -> int:
        """Multiplications for each pair of a query and a key that it sees: for the score and for the value."""
        return 2 * self.heads

    @property
    def cached(self) -> int:
        """Channels that a server's KV cache holds for each token."""
        return 2 * self.kv_heads

    @property
    def attended(self) -> int:
        """Channels of the kernel's output, which checkpointing by operation keeps."""
        return self.heads

    @property
    def sent(self) -> int:
        """Channels that Helix sends to the rank that computes attention. That rank sends back ``attended``."""
        return self.heads + 2 * self.kv_heads

    @property
    def kept(self) -> int:
        """Channels of a token that attention keeps for its backward pass, besides its input and the norm's."""
        norms = self.heads + self.kv_heads if self.has_qk_norm else 0
        return 2 * self.heads + 2 * self.kv_heads + norms


@dataclass(frozen=True)
class GatedFeedForward:
    """``w2(silu(w1 x) * w3 x)`` (https://arxiv.org/abs/2002.05202)."""

    dim: int
    hidden: int

    has_experts = False

    @property
    def parts(self) -> tuple[Part, ...]:
        up = (self.hidden, self.dim)
        return (
            linear("feed_forward.w1", "mlp.gate_proj", up, 0),
            linear("feed_forward.w3", "mlp.up_proj", up, 0),
            linear("feed_forward.w2", "mlp.down_proj", (self.dim, self.hidden), 1),
        )

    @property
    def width(self) -> int:
        """Hidden channels that are computed for each token."""
        return self.hidden

    @property
    def kept(self) -> int:
        return 4 * self.hidden

    @property
    def products(self) -> int:
        """Multiplications of a token with weights."""
        return sum(math.prod(part.shape) for part in self.parts)

    idle = 0
    """Weights that a token does not meet."""


@dataclass(frozen=True)
class RoutedExperts:
    """Each token is computed by its ``top_k`` experts (https://arxiv.org/abs/1701.06538).

    The experts' outputs are weighted by the softmax of all experts' scores; ``normalizes`` makes a token's
    weights sum to 1. Nothing balances the experts' load, since servers do not support a bias for this.
    """

    dim: int
    expert_hidden: int
    num_experts: int
    top_k: int
    normalizes: bool = False

    has_experts = True

    @property
    def parts(self) -> tuple[Part, ...]:
        count, up = self.num_experts, (self.num_experts, self.expert_hidden, self.dim)
        return (
            Part("moe.router.gate", "mlp.gate", (count, self.dim)),
            Part("moe.experts.w1", "mlp.experts.{}.gate_proj", up, 1),
            Part("moe.experts.w3", "mlp.experts.{}.up_proj", up, 1),
            Part(
                "moe.experts.w2",
                "mlp.experts.{}.down_proj",
                (count, self.dim, self.expert_hidden),
                2,
            ),
        )

    @property
    def width(self) -> int:
        return self.top_k * self.expert_hidden

    @property
    def kept(self) -> int:
        copies = 2 * self.top_k * self.dim if self.top_k > 1 else 0
        return copies + 4 * self.width

    @property
    def products(self) -> int:
        return self.dim * self.num_experts + 3 * self.dim * self.width

    @property
    def idle(self) -> int:
        return 3 * self.dim * self.expert_hidden * (self.num_experts - self.top_k)


Attention = GroupedAttention
"""A union of the kinds of attention."""
FeedForward = GatedFeedForward | RoutedExperts


@dataclass(frozen=True)
class Layer:
    """A layer: ``x + attention(norm(x))``, and then ``x + feed_forward(norm(x))``."""

    attention: Attention
    feed_forward: FeedForward

    @property
    def dim(self) -> int:
        return self.attention.dim

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order in which they are used."""
        norm = (self.dim,)
        return (
            Part("attention_norm", "input_layernorm", norm, norms="hidden"),
            *self.attention.parts,
            Part("ffn_norm", "post_attention_layernorm", norm, norms="hidden"),
            *self.feed_forward.parts,
        )

    @property
    def products(self) -> int:
        """Multiplications of a token with weights."""
        own = sum(math.prod(part.shape) for part in self.attention.parts if part.is_linear)
        return own + self.feed_forward.products

    def _kept_products(self) -> list[Part]:
        """Returns the parts whose matrix products' results checkpointing by operation keeps: every second one.

        Products of experts are not counted, nor those to which a bias is added, nor the router's, which
        ``per_op_sac_force_recompute_mm_shapes_by_fqns`` names.
        """
        counted = [part for part in self.parts if part.is_linear and not part.has_bias]
        return [part for part in counted if "router" not in part.name][::2]

    def kept_channels(self, mode: str) -> float:
        """Returns how many channels of a token the layer keeps for its backward pass.

        ``mode`` is ``none``, ``full``, ``op``, or a number n: full checkpointing of every n-th layer.
        """
        if mode.isdigit():
            part = 1 / max(int(mode), 1)
            return part * self.dim + (1 - part) * self.kept_channels("none")
        if mode == "full":
            return self.dim
        # The sum of 32 bits that a norm or the attention keeps for each head is left out.
        if mode == "op":
            kept = sum(part.shape[0] for part in self._kept_products())
            return self.dim + self.attention.attended + kept
        return 4 * self.dim + self.attention.kept + self.feed_forward.kept

    def recomputed(self, mode: str) -> float:
        """Returns how many multiplications of a token with weights the layer's backward pass repeats."""
        if mode.isdigit():
            return self.products / max(int(mode), 1)
        if mode == "op":
            return self.products - sum(math.prod(part.shape) for part in self._kept_products())
        return self.products if mode == "full" else 0.0


@dataclass(frozen=True)
class Layers:
    """The layers of a model: the different kinds of layers, and for each layer the index of its kind."""

    kinds: tuple[Layer, ...]
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, layers: list[Layer]) -> "Layers":
        kinds = tuple(dict.fromkeys(layers))
        return cls(kinds, tuple(map(kinds.index, layers)))

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Layer]:
        return (self.kinds[kind] for kind in self.order)

    def __getitem__(self, number: int) -> Layer:
        return self.kinds[self.order[number]]
