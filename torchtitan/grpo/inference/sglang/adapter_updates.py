# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

# SGLang has a separate environment, which the type checker does not see.
# pyright: reportMissingImports=false

"""Lets an SGLang server add low-rank adapters to its base weights, so that only adapters are sent.

Adapters come through SGLang's own route and process group. Two plugin hooks in the scheduler keep the
adapters' factors until all have arrived. They then read the base weights from the server's directory, add
the adapters, and give the sums to SGLang, which loads them like any weights. Weights without adapters are
loaded as well, because a server that had another run's weights would otherwise serve a mixture.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch

from torchtitan.grpo.weight_wire.adapters import BaseWeights, is_of_adapters
from torchtitan.grpo.weight_wire.transfer_messages import (
    PROBE,
    READY,
    AdapterNote,
    BucketSpec,
    note_of,
)

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def register_hooks() -> None:
    """Registers the hooks if this release of SGLang has plugins. Otherwise the client's probe will fail."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError:
        return
    received = ReceivedAdapters()
    HookRegistry.register(
        f"{_UPDATER}.receive_weights_from_distributed", received.receive, HookType.AROUND
    )
    HookRegistry.register(f"{_UPDATER}.load_weights_from_distributed", load, HookType.AROUND)


class Probed(list[tuple[str, torch.Tensor]]):
    """The empty list of weights in a probe. The client sends probes to ask whether the hooks are installed."""


def load(original: Callable[..., Any], updater: Any, weights: NamedTensors) -> Any:
    """Replaces SGLang's ``load_weights_from_distributed``: answers a probe, and loads weights as SGLang does."""
    return (True, READY) if isinstance(weights, Probed) else original(updater, weights)


class AdaptedWeights:
    """All weights of a directory, with adapters added. Each iteration computes them again, one by one."""

    def __init__(
        self, base: BaseWeights, factors: dict[str, torch.Tensor], lora_scale: float
    ) -> None:
        self._base, self._factors, self._lora_scale = base, factors, lora_scale

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._base.all_with(self._factors, self._lora_scale)


class ReceivedAdapters:
    def __init__(self) -> None:
        self._base_in = lru_cache(maxsize=1)(BaseWeights)
        self._factors: dict[str, torch.Tensor] = {}
        self._num_buckets = 0

    def receive(
        self,
        original: Callable[..., NamedTensors],
        updater: Any,
        *,
        load_format: str | None = None,
        **described: Any,
    ) -> NamedTensors:
        """Receives one bucket with SGLang's ``original`` method. Returns the weights that SGLang is to load.

        A note in ``load_format`` marks buckets of adapters. For these the result is empty until the last
        bucket, and then it is all weights of the server's directory with the adapters added. Raises
        ValueError if the adapters belong to another base model, or if a bucket is missing.
        """
        if load_format == PROBE:
            return Probed()
        note = note_of(load_format)
        if note is None:
            return original(updater, load_format=load_format, **described)
        base = self._base_in(updater.model_config.model_path)
        base.check(_bucket(note, described))
        if note.index == 0:
            self._factors, self._num_buckets = {}, 0
        if note.index != self._num_buckets:
            self._factors = {}
            raise ValueError(
                f"Bucket {self._num_buckets} of the adapters must come next, got bucket {note.index}."
            )
        # In the order of the broadcasts, so only what was received is counted.
        self._factors.update(original(updater, load_format="flattened_bucket", **described))
        self._num_buckets += 1
        if not note.is_last:
            return []
        factors, self._factors = self._factors, {}
        base.require_pairs(factors)
        return AdaptedWeights(base, factors, note.lora_scale)


def _bucket(note: AdapterNote, described: dict[str, Any]) -> BucketSpec:
    bucket = BucketSpec(
        tuple(described["names"]),
        tuple(described["dtypes"]),
        tuple(tuple(shape) for shape in described["shapes"]),
        lora_scale=note.lora_scale,
        lora_base=note.lora_base,
    )
    is_of_adapters(bucket)
    return bucket
