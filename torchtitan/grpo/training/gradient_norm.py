# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Clips the gradient of all ranks' parameters by its norm.

A pipeline with tied embeddings holds one weight in its first and in its last stage, each with a
part of the gradient. The parts are added up before clipping, and the norm counts the sum once. Both
copies then have equal gradients, optimizer states and, from one step to the next, values.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from torchtitan.grpo.models.decoder import OutputEmbedding, embeds_tokens, is_tied
from torchtitan.grpo.models.helix import HelixPart
from torchtitan.grpo.models.shards import named_parameters
from torchtitan.grpo.upstream.parallelism import ParallelDims, dist_utils


class GradientClipper:
    def __init__(self, parts: Sequence[nn.Module], dims: ParallelDims, max_norm: float) -> None:
        self._parts, self._dims, self._max_norm = parts, dims, max_norm

    def parameters(self) -> list[nn.Parameter]:
        return [p for part in self._parts for p in part.parameters()]

    def clip(self) -> torch.Tensor:
        """Clips in place and returns the norm before clipping, on the device."""
        twins = self._add_up_tied()
        # The copy in the last stage is another name of what the first stage counts.
        uncounted = {id(parameter) for parameter in twins}
        norm = dist_utils.clip_grad_norm_(
            [p for p in self.parameters() if id(p) not in uncounted],
            self._max_norm,
            foreach=True,
            pp_mesh=self._dims.get_optional_mesh("pp"),
            ep_enabled=self._dims.ep_enabled,
        )
        torch.nn.utils.clip_grads_with_norm_(twins, self._max_norm, norm, foreach=True)
        return norm

    def largest(self, norm: float, group: dist.ProcessGroup) -> tuple[str, float]:
        """Returns the parameter with the largest gradient, and its share of the square of ``norm``.

        Call this only after :meth:`clip`, and only if needed: it computes the norm of each parameter.
        Collective over all ranks, which ``group`` joins on the CPU.
        """
        trained = {n: p for n, p in named_parameters(list(self._parts)) if p.requires_grad}
        norms = [_whole_norm(parameter) for parameter in trained.values()]
        own = max(zip(torch.stack(norms).tolist(), trained, strict=True)) if norms else (0.0, "")
        of_ranks = [own] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, own, group=group)  # a pipeline's ranks hold different ones
        largest, name = max(of_ranks)
        return name, min((largest / min(norm, self._max_norm)) ** 2, 1.0)

    def _add_up_tied(self) -> list[nn.Parameter]:
        """Adds up the gradients of a tied weight's two copies; returns the last stage's copy."""
        if not (self._dims.pp_enabled and is_tied(self._parts[0])):
            return []
        first = [_weight(part) for part in self._parts if embeds_tokens(part)]
        last = [
            _weight(part)
            for part in self._parts
            if isinstance(part.tok_embeddings, OutputEmbedding)
        ]
        if not all(weight.requires_grad for weight in first + last):
            return []  # frozen on all ranks
        copies = [_local_gradient(weight) for weight in first + last]
        if len(copies) == 2:  # a V places both stages on one rank
            copies[0].add_(copies[1])
            copies[1].copy_(copies[0])
        elif copies:
            copies[0].add_(self._other_copy(copies[0], to_last=bool(first)))
        return last

    def _other_copy(self, mine: torch.Tensor, *, to_last: bool) -> torch.Tensor:
        """Sends this copy's gradient to the pipeline rank with the other copy, and returns that one's."""
        mesh, part = self._dims.get_mesh("pp"), self._parts[0]
        # Stages that go round and round end on the last rank, and parts of layers on any rank.
        last = mesh.size() - 1
        if isinstance(part, HelixPart):
            last = part.model_args.n_layers % mesh.size()
        group = mesh.get_group()
        peer = dist.get_global_rank(group, last if to_last else 0)
        theirs = torch.empty_like(mine)
        exchange = [
            dist.P2POp(dist.isend, mine, peer, group),
            dist.P2POp(dist.irecv, theirs, peer, group),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        return theirs


def _weight(stage: nn.Module) -> nn.Parameter:
    embeddings = stage.tok_embeddings
    assert isinstance(embeddings, nn.Embedding)
    assert isinstance(embeddings.weight, nn.Parameter)
    return embeddings.weight


def _whole_norm(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the norm of a gradient. Collective over the ranks that share the parameter."""
    # A rank without a gradient takes part in the sum as well.
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    norm = torch.nn.utils.get_total_norm([grad], foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _local_gradient(weight: nn.Parameter) -> torch.Tensor:
    """Returns this rank's shard of a weight's gradient, sharded as the weight is."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    if not isinstance(weight, DTensor):
        return weight.grad
    grad = weight.grad
    assert isinstance(grad, DTensor)
    if grad.placements != weight.placements:
        # Under tensor parallelism an embedding's gradient may be whole, or a sum to be completed.
        weight.grad = grad = grad.redistribute(placements=weight.placements)
    return grad.to_local()
