# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Costs by calculation, for a model on a kind of GPU.

A step of a server reads all weights and the KV cache of every running completion from memory, and
multiplies one token of each with the weights that a token uses (the roofline of decoding). The times of
training, prompts and weight pushes follow from their FLOPs and bytes. Hardware reaches only a part of its
peak: the parts below are typical of well-tuned programs, not measured here, and a run of another kind can
differ by a factor of two. Costs that were measured in a run (``measured.py``) need none of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.grpo.commands.forecast.system import Costs
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.cost import flops_cost
from torchtitan.grpo.models.families import family_of

_GIB, _BFLOAT16 = 1024**3, 2
TRAIN_PART, PROMPT_PART, MEMORY_PART, NETWORK_PART = 0.35, 0.5, 0.6, 0.5
"""Parts of the peak: FLOP/s of training and of prompts, memory bandwidth, network bandwidth."""
STEP_SECONDS, BATCH_SECONDS, PUSH_SECONDS = 0.003, 0.1, 0.2
"""Assumed times besides those of the hardware: of a server's step, of a training step, and of a push."""
ROOM_SECONDS, WAKE_SECONDS, SLEEP_SECONDS = 1.0, 3.0, 1.0
"""Assumed times of lending, until a run has measured them. Waking takes a push besides."""
LENDING = {
    "room": "lend/room_give_seconds",
    "wake": "lend/wake_seconds",
    "sleep": "lend/sleep_seconds",
}
"""Costs of lending, with the metrics that measure them."""
_PASSES = 3  # a forward and a backward pass, in forward passes


@dataclass(frozen=True)
class Device:
    """A GPU: dense FLOP/s in bfloat16, bytes/s of memory and network, and bytes of memory."""

    flops: float
    memory_rate: float
    network_rate: float
    memory: int


DEVICES = {
    "a100": Device(312e12, 2.0e12, 25e9, 79 * _GIB),
    "h100": Device(989e12, 3.35e12, 50e9, 79 * _GIB),
    "h200": Device(989e12, 4.8e12, 50e9, 140 * _GIB),
    "b200": Device(2250e12, 8.0e12, 50e9, 178 * _GIB),
}
"""By their data sheets, with one network card of 200 or 400 Gbit/s for each GPU."""


def computed_costs(
    config: JobConfig,
    model: Mapping[str, Any],
    device: Device,
    *,
    num_ranks: int,
    server_devices: int,
    context_tokens: float,
) -> Costs:
    """Returns costs for a ``config.json``; ``context_tokens`` is the mean length of a running sequence.

    The costs hold for at most as many servers as ranks: with more servers, sending weights takes longer.
    """
    cost, num_bytes = flops_cost(model), weight_bytes(model)
    read = server_devices * device.memory_rate * MEMORY_PART
    prompt_token = cost.per_token / _PASSES / (server_devices * device.flops * PROMPT_PART)
    passes = _PASSES * config.grpo.num_epochs + (config.grpo.kl_coef > 0)
    if config.has_critic:  # whose values need a pass before the first update
        passes += _PASSES * config.grpo.num_epochs + 1
    flops = passes / _PASSES * (cost.per_token + cost.per_pair * context_tokens / 2)
    transfer = num_bytes / (device.network_rate * NETWORK_PART)
    push = PUSH_SECONDS + transfer
    return Costs(
        token=STEP_SECONDS + num_bytes / read,
        beside=kv_bytes(model) * context_tokens / read + prompt_token,
        prefill=prompt_token,
        train_token=flops / (num_ranks * device.flops * TRAIN_PART),
        train=BATCH_SECONDS,
        push=push,
        transfer=transfer,
        room=ROOM_SECONDS,
        wake=WAKE_SECONDS + push,
        sleep=SLEEP_SECONDS,
    )


def weight_bytes(model: Mapping[str, Any]) -> float:
    """Bytes of all weights in bfloat16, including the experts that a token does not use."""
    idle = sum(layer.feed_forward.idle for layer in family_of(model).layers(model))
    return _BFLOAT16 * (flops_cost(model).per_token / (2 * _PASSES) + idle)


def kv_bytes(model: Mapping[str, Any]) -> int:
    """Bytes of one token in the KV cache, in bfloat16."""
    return _BFLOAT16 * sum(layer.attention.cached for layer in family_of(model).layers(model))


def cache_places(model: Mapping[str, Any], server_bytes: float, tokens: float) -> int:
    """How many sequences of ``tokens`` fit into a server's memory besides the weights; 0 if none."""
    return max(0, int((server_bytes - weight_bytes(model)) / (tokens * kv_bytes(model))))
