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
    """The last layer of a model: from hidden states to (log-probability, entropy).

    It is an ``nn.Linear`` by its parameter, ``weight`` [vocab, dim], so state-dict keys and
    upstream's ``ColwiseParallel`` and FSDP plans hold for it. Labels are not an input of a
    model's ``forward``, so they are set around it::

        with model.output.labelled(labels):
            packed = model(tokens)  # [rows, seq, 2]

    Under tensor parallelism the weight is a ``DTensor`` sharded by vocabulary and the
    hidden states are replicated; the result is replicated, and no logits travel.
    """

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        keep_logits: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, vocab, bias=False, device=device, dtype=dtype)
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.with_entropy = with_entropy
        self.keep_logits = keep_logits
        self._labels: torch.Tensor | None = None

    @contextmanager
    def labelled(self, labels: torch.Tensor) -> Iterator[None]:
        """Scores ``labels`` [rows, seq] int in forward passes inside of the context."""
        outer, self._labels = self._labels, labels
        try:
            yield
        finally:
            self._labels = outer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """From [rows, seq, dim] to [rows, seq, 2] float32: log-probability, entropy or 0.

        Raises:
            RuntimeError: No labels were set, see :meth:`labelled`.
            ValueError: The weight's or the hidden states' sharding is another than
                ``ColwiseParallel`` makes.
        """
        if self._labels is None:
            raise RuntimeError("The output layer needs labels: call it inside `labelled(labels)`.")
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
                f"Hidden states must be a replicated DTensor where the output weight is one, got "
                f"{got}. Parallelise the output layer with ColwiseParallel."
            )
        _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
        packed = self._score(
            # Each rank's ids give a part of this gradient; DTensor adds them up.
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
        return packed_linear_logprobs(
            hidden,
            weight,
            labels,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=self.with_entropy,
            keep_logits=self.keep_logits,
            group=group,
            vocab_start=vocab_start,
        )

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        settings = f"temperature={self.temperature}, chunk_tokens={self.chunk_tokens}"
        switches = f"with_entropy={self.with_entropy}, keep_logits={self.keep_logits}"
        return f"{super().extra_repr()}, {settings}, {switches}"


def replace_output(
    model: nn.Module,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    keep_logits: bool,
) -> LogprobHead | None:
    """Puts a :class:`LogprobHead` in the place of ``model.output``.

    The parameter object is kept, and with it weight tying, device and dtype. To be called
    before the model is parallelised or wrapped.

    Returns:
        The head, or None where the model (a pipeline stage before the last) has no output.

    Raises:
        ValueError: The output layer is not an ``nn.Linear`` without bias.
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
        keep_logits=keep_logits,
        device="meta",
    )
    head.weight = output.weight
    model.output = head
    return head
