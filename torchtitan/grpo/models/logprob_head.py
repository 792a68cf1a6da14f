# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An output projection that returns log-probabilities of labels instead of logits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan.grpo.losses.linear_logprobs import packed_linear_logprobs


class LogprobHead(nn.Linear):
    """Maps hidden states to (log-probability, entropy), as the last layer of a model.

    Its parameter ``weight`` [vocab, dim] is that of an ``nn.Linear``, so that state-dict keys
    and upstream's ``ColwiseParallel`` and FSDP plans apply to it. Labels are not an input of
    the model's ``forward``; they are set around it::

        with model.output.labeled(labels):
            packed = model(tokens)  # [rows, seq, 2]

    Each token may have further ids whose log-probabilities are computed as well.

    Under tensor parallelism the weight is a ``DTensor`` sharded by vocabulary and the hidden
    states are replicated. The result is replicated, and no logits are sent between ranks.
    """

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        trains_entropy: bool = True,
        keep_logits: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, vocab, bias=False, device=device, dtype=dtype)
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.with_entropy = with_entropy
        self.trains_entropy = trains_entropy
        self.keep_logits = keep_logits
        self._labels: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._other_ids: torch.Tensor | None = None

    @contextmanager
    def labeled(
        self,
        labels: torch.Tensor,
        positions: torch.Tensor | None = None,
        other_ids: torch.Tensor | None = None,
    ) -> Iterator[None]:
        """Makes forward passes inside the context score labels.

        Args:
            labels: [rows, seq] int.
            positions: [tokens] int64, the tokens to score, counted row by row; None for all.
            other_ids: [rows, seq, k] int, further ids of each token; see
                :func:`packed_linear_logprobs`. None for none.
        """
        outer = self._labels, self._positions, self._other_ids
        self._labels, self._positions, self._other_ids = labels, positions, other_ids
        try:
            yield
        finally:
            self._labels, self._positions, self._other_ids = outer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Maps [rows, seq, dim] to [rows, seq, 2 + k] float32.

        They are log-probability, entropy or 0, and the log-probabilities of ``k`` other ids, all 0
        where nothing is scored.

        Raises:
            RuntimeError: If no labels are set; see :meth:`labeled`.
            ValueError: If weight or hidden states are not sharded as ``ColwiseParallel`` does.
        """
        if self._labels is None:
            raise RuntimeError("The output layer needs labels: call it inside `labeled(labels)`.")
        if not isinstance(self.weight, DTensor):
            return self._score(hidden, self.weight, self._labels, None, 0)
        return self._score_sharded(hidden, self.weight, self._labels)

    def _score_sharded(
        self, hidden: torch.Tensor, weight: DTensor, labels: torch.Tensor
    ) -> torch.Tensor:
        mesh = weight.device_mesh
        if mesh.ndim != 1 or weight.placements != (Shard(0),):
            raise ValueError(
                "The output weight must be sharded by vocabulary over the tensor-parallel mesh "
                f"alone, got {weight.placements} over {mesh}."
            )
        if not isinstance(hidden, DTensor) or hidden.placements != (Replicate(),):
            got = hidden.placements if isinstance(hidden, DTensor) else "a plain tensor"
            raise ValueError(
                "Hidden states must be a replicated DTensor if the output weight is a DTensor, got "
                f"{got}. Parallelize the output layer with ColwiseParallel."
            )
        _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
        packed = self._score(
            # Each rank's part of the vocabulary yields a part of this gradient; DTensor sums them.
            hidden.to_local(grad_placements=[Partial()]),
            weight.to_local(),
            labels.to_local() if isinstance(labels, DTensor) else labels,
            mesh.get_group(),
            offset[0],
        )
        return DTensor.from_local(packed, mesh, [Replicate()], run_check=False)

    def _score(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        group: ProcessGroup | None,
        vocab_start: int,
    ) -> torch.Tensor:
        shape, positions, other_ids = labels.shape, self._positions, self._other_ids
        if positions is not None:
            hidden = hidden.flatten(0, 1).index_select(0, positions)
            labels = labels.flatten().index_select(0, positions)
            if other_ids is not None:
                other_ids = other_ids.flatten(0, 1).index_select(0, positions)
        packed = packed_linear_logprobs(
            hidden,
            weight,
            labels,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=self.with_entropy,
            trains_entropy=self.trains_entropy,
            keep_logits=self.keep_logits,
            group=group,
            vocab_start=vocab_start,
            other_ids=other_ids,
        )
        if positions is None:
            return packed
        # Not a view: FSDP2 cannot hook the outputs of a module that are views.
        where = (positions // shape[1], positions % shape[1])
        return packed.new_zeros(*shape, packed.shape[-1]).index_put(where, packed)

    def extra_repr(self) -> str:
        """Returns what ``print(model)`` shows of this layer."""
        settings = f"temperature={self.temperature}, chunk_tokens={self.chunk_tokens}"
        switches = f"with_entropy={self.with_entropy}, trains_entropy={self.trains_entropy}"
        return f"{super().extra_repr()}, {settings}, {switches}, keep_logits={self.keep_logits}"


def replace_output(
    model: nn.Module,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    trains_entropy: bool = True,
    keep_logits: bool,
) -> LogprobHead | None:
    """Replaces ``model.output`` with a :class:`LogprobHead`.

    The parameter object is kept, and with it weight tying, device and dtype. The function must
    be called before the model is parallelized or wrapped.

    Returns:
        The head, or None if the model is a pipeline stage without an output layer.

    Raises:
        ValueError: If the output layer is not an ``nn.Linear`` without bias.
    """
    output = getattr(model, "output", None)
    if output is None:
        return None
    if type(output) is not nn.Linear or output.bias is not None:
        raise ValueError(f"model.output must be an nn.Linear without bias, got {output}.")
    head = LogprobHead(
        output.in_features,
        output.out_features,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        trains_entropy=trains_entropy,
        keep_logits=keep_logits,
        device="meta",
    )
    head.weight = output.weight
    model.output = head
    return head
