# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Computes the trainer's logprobs of fixed tokens, with which those of servers are compared."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
import torch.nn as nn

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.feed import Feed
from torchtitan.grpo.data.rows import Sample, build_rows
from torchtitan.grpo.models.packed_attention import PackedAttentionKind
from torchtitan.grpo.models.packed_model import LogprobHead, PackedModel
from torchtitan.grpo.training.frame import Trainer
from torchtitan.grpo.training.ranks import RankRole
from torchtitan.grpo.training.runner import ForwardRunner
from torchtitan.grpo.upstream.parallelism import ParallelDims
from torchtitan.grpo.weight_sync.attestation import attested_tokens


class PolicyProbe:
    """Computes the logprobs of fixed tokens with the current weights, in any layout.

    It runs on the training thread of all ranks and waits for no server. The one rank that ``is_speaker``
    must see the model's output; its result is returned on every rank.
    """

    def __init__(
        self,
        runner: ForwardRunner,
        model_parts: Sequence[nn.Module],
        feed: Feed,
        tokens: Sequence[int],
        shape: tuple[int, int],
        device: torch.device,
        is_speaker: bool,
    ) -> None:
        self._runner, self._feed, self._is_speaker = runner, feed, is_speaker
        self._heads = [m for p in model_parts for m in p.modules() if isinstance(m, LogprobHead)]
        ids, (num_rows, row_len) = np.asarray(tokens, np.int32), shape
        sample = Sample(ids[:1], ids[1:], np.zeros(len(ids) - 1, np.float32))
        rows = build_rows([sample], [[0], *([] for _ in range(num_rows - 1))], row_len)
        self._rows = rows.to(device)
        self._num_rated = len(tokens) - 1

    def logprobs(self) -> list[float]:
        """Returns ``len(tokens) - 1`` logprobs at temperature 1, on every rank. Collective."""
        with _untempered(self._heads):
            output = self._runner.forward(self._rows)
        rated = torch.zeros(self._num_rated, dtype=torch.float64)
        if self._is_speaker:
            assert output is not None
            rated += output[0, : self._num_rated, 0].cpu()
        return self._feed.all_reduce_sum(rated).tolist()


def build_probe(
    trainer: Trainer, runner: ForwardRunner, feed: Feed, role: RankRole, vocab_size: int
) -> PolicyProbe:
    config: JobConfig = trainer.job_config  # pyright: ignore[reportAssignmentType]
    tokens = attested_tokens(config, vocab_size)
    attention = cast(PackedModel, trainer.model_parts[0]).settings.attention
    shape = probe_shape(config, trainer.parallel_dims, len(tokens), attention)
    is_speaker = role.is_counted and role.batch_rank == 0
    parts, device = trainer.model_parts, trainer.device
    return PolicyProbe(runner, parts, feed, tokens, shape, device, is_speaker)


def probe_shape(
    config: JobConfig, dims: ParallelDims, num_tokens: int, attention: PackedAttentionKind
) -> tuple[int, int]:
    """Returns the number and the length of a probe's rows.

    Pipelines accept only the shape of training, and compiled models and FlexAttention would have to be
    compiled again for another shape. All others run one short row of a length that ``dims`` can divide.
    """
    training = config.training
    if dims.pp_enabled:
        return config.parallelism.pipeline_parallel_microbatch_size, training.seq_len
    if config.compile.enable or attention == "flex":
        return training.local_batch_size, training.seq_len
    divisor = dims.seq_len_divisor
    return 1, -(-num_tokens // divisor) * divisor


@contextmanager
def _untempered(heads: Sequence[LogprobHead]) -> Iterator[None]:
    temperatures = [head.temperature for head in heads]
    for head in heads:
        head.temperature = 1.0
    try:
        yield
    finally:
        for head, temperature in zip(heads, temperatures, strict=True):
            head.temperature = temperature
