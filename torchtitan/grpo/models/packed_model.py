# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The model for packed rows; it returns log-probabilities of labels, or values, instead of logits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan.grpo.losses.linear_logprobs import packed_linear_logprobs
from torchtitan.grpo.models.decoder import Decoder, DecoderArgs, embeds_tokens
from torchtitan.grpo.models.packed_attention import (
    HostReach,
    Mask,
    PackedAttention,
    PackedAttentionKind,
    context_part,
    gather_sequence,
    packed_mask,
)


@dataclass(frozen=True)
class ScoringSettings:
    """How a model computes the log-probabilities of tokens.

    ``keep_logits`` stores logits in the memory of the output weight's gradient, which is allocated
    in the forward pass. Logits are computed for ``chunk_tokens`` tokens at a time. Without
    ``with_entropy``, 0 is returned as the entropy. ``compiled`` blocks need masks of fixed sizes; with
    ``shares_contexts``, this includes the masks of shared contexts. With the ``head`` "values", the
    model is a critic, and computes no log-probabilities.
    """

    attention: PackedAttentionKind
    compiled: bool
    temperature: float
    chunk_tokens: int
    with_entropy: bool
    trains_entropy: bool
    keep_logits: bool
    shares_contexts: bool = True
    head: Literal["logprobs", "values"] = "logprobs"


class ScoredTokens:
    """A mask of the tokens to score, [rows, seq] bool, kept both on the host and on the device.

    The number of scored tokens determines shapes. If only the device had the mask, the host would
    wait for that number in every microbatch. This is not a plain tensor, as FSDP would move that to
    the device.
    """

    def __init__(self, mask: torch.Tensor, host_mask: torch.Tensor) -> None:
        self._mask, self._host_mask = mask, host_mask

    def positions(self, part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """Returns the scored tokens' indices in the flattened ``part`` of the rows, [tokens]; None for all."""
        host_part = part(self._host_mask)
        count = int(np.count_nonzero(host_part.numpy()))
        if count == host_part.numel():
            return None
        return torch.nonzero_static(part(self._mask).flatten(), size=count).squeeze(1)


class TokenHead(nn.Linear):
    """The last layer of a model, which computes numbers for each scored token of its rows.

    The scored tokens are set around the model's ``forward``::

        with model.output.labeled(labels):
            packed = model(tokens)  # [rows, seq, 2]
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False, device="meta")
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
        """Forward passes inside the context score ``labels``, [rows, seq] int.

        ``positions`` [tokens] int64 are indices of scored tokens in flattened rows; None for all.
        ``other_ids`` are [rows, seq, k] int, see :func:`packed_linear_logprobs`.
        """
        outer = self._labels, self._positions, self._other_ids
        self._labels, self._positions, self._other_ids = labels, positions, other_ids
        try:
            yield
        finally:
            self._labels, self._positions, self._other_ids = outer

    def _in_rows(self, numbers: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Scatters the scored tokens' numbers, [tokens, k], into rows, [rows, seq, k], with 0 elsewhere."""
        positions = self._positions
        if positions is None:
            return numbers
        # Not a view: FSDP2 cannot hook the outputs of a module that are views.
        where = (positions // shape[1], positions % shape[1])
        return numbers.new_zeros(*shape, numbers.shape[-1]).index_put(where, numbers)


class ValueHead(TokenHead):
    """Maps hidden states to values, as the last layer of a critic.

    Its ``weight`` [1, dim] and its arithmetic are float32. Under tensor parallelism, weight, hidden
    states and result are replicated, and every rank computes the same.
    """

    def __init__(self, output: nn.Linear) -> None:
        super().__init__(output.in_features, 1)
        weight = torch.empty(
            1, output.in_features, dtype=torch.float32, device=output.weight.device
        )
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Maps [rows, seq, dim] to [rows, seq, 1] float32, 0 where nothing is scored."""
        weight, shape = self.weight, hidden.shape[:2]
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        if self._positions is not None:
            hidden = hidden.flatten(0, 1).index_select(0, self._positions)
        return self._in_rows(F.linear(hidden.float(), weight), shape)


class LogprobHead(TokenHead):
    """Maps hidden states to (log-probability, entropy), as the last layer of a model.

    Its ``weight`` [vocab, dim] is named as in an ``nn.Linear``, for state dicts and tensor
    parallelism. Under tensor parallelism the weight is sharded by vocabulary, and hidden states and
    result are replicated. No logits are sent between ranks.
    """

    def __init__(self, output: nn.Linear, settings: ScoringSettings) -> None:
        super().__init__(output.in_features, output.out_features)
        # The parameter object is kept, and with it weight tying, device and dtype.
        self.weight = output.weight
        self.settings = settings
        self.temperature = settings.temperature

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Maps [rows, seq, dim] to [rows, seq, 2 + k] float32, 0 where nothing is scored."""
        if self._labels is None:
            raise RuntimeError("The output layer needs labels: call it inside `labeled(labels)`.")
        if not isinstance(self.weight, DTensor):
            return self._score(hidden, self.weight, self._labels)
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
        group: dist.ProcessGroup | None = None,
        vocab_start: int = 0,
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
            chunk_tokens=self.settings.chunk_tokens,
            with_entropy=self.settings.with_entropy,
            trains_entropy=self.settings.trains_entropy,
            keep_logits=self.settings.keep_logits,
            group=group,
            vocab_start=vocab_start,
            other_ids=other_ids,
        )
        return self._in_rows(packed, shape)


def replace_output(model: nn.Module, settings: ScoringSettings) -> None:
    """Replaces ``model.output`` if there is one. Call it before parallelism is applied."""
    output = getattr(model, "output", None)
    if output is None:
        return
    if type(output) is not nn.Linear or output.bias is not None:
        raise ValueError(f"model.output must be an nn.Linear without bias, got {output}.")
    has_values = settings.head == "values"
    model.output = ValueHead(output) if has_values else LogprobHead(output, settings)


class PackedModel(Decoder):
    context_group: dist.ProcessGroup | None = None

    def __init__(self, model_args: DecoderArgs, settings: ScoringSettings) -> None:
        super().__init__(model_args)
        self.settings = settings
        replace_output(self, settings)

    def split_context(self, group: dist.ProcessGroup) -> None:
        self.context_group = group
        for module in self.modules():
            if isinstance(module, PackedAttention):
                module.context_group = group

    def attention_masks(
        self,
        *,
        reach: torch.Tensor,
        positions: torch.Tensor,
        host_reach: HostReach | None = None,
        **_: Any,
    ) -> Sequence[Mask]:
        """Returns a mask for each kind of layer, from keyword arguments of :meth:`forward`."""
        settings, masks = self.settings, dict[int | None, Mask]()
        windows = [kind.attention.window for kind in self.model_args.layers.kinds]
        for window in windows:
            if window not in masks:
                masks[window] = packed_mask(
                    reach,
                    settings.attention,
                    host_reach,
                    compiled=settings.compiled,
                    may_share=settings.shares_contexts,
                    window=window,
                    positions=positions,
                )
        return [masks[window] for window in windows]

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        reach: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        host_reach: HostReach | None = None,
        scored: ScoredTokens | None = None,
        other_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs packed rows through the model, or through one pipeline stage of it.

        Arguments are [rows, seq] int, as in ``TrainRows``: ``tokens`` (hidden states on later stages),
        ``reach`` (also as ``host_reach``), ``positions`` in each sequence, and ``labels``;
        ``other_ids`` is [rows, seq, k]. Returns the output of the :class:`TokenHead`, or this rank's
        hidden states if the stage has none.
        """
        group = self.context_group
        if embeds_tokens(self):
            tokens = context_part(tokens, group)
        masks = self.attention_masks(reach=reach, positions=positions, host_reach=host_reach)
        inputs = (tokens, context_part(positions, group), masks)
        head: Any = self.output
        if not isinstance(head, TokenHead):
            return self.decode(*inputs)
        where = scored.positions(lambda mask: context_part(mask, group)) if scored else None
        if other_ids is not None:
            other_ids = context_part(other_ids, group)
        with head.labeled(context_part(labels, group), where, other_ids):
            return gather_sequence(self.decode(*inputs), group)
