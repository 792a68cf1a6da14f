# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[weight_sync]`` table: the transfer of weights from the trainer to the servers."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class WeightSync:
    """``[weight_sync]``: how weights travel to the servers."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Transport of the weight groups. ``auto`` with ``inference.launch``: NCCL where trainer
    and servers each have GPUs of their own, gloo otherwise. ``auto`` with
    ``inference.urls``: NCCL where the trainer has a GPU; set gloo for servers on CPU or on
    the trainer's own GPU, which it cannot see."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Wire dtype. ``auto``: ``training.mixed_precision_param``, which is what the
    trainer's own forward computes with."""

    bucket_bytes: int = 256 * 1024 * 1024
    """Tensors travel in buckets of about this size; one tensor is never split. Receivers have
    room for a bucket or two, and on CUDA the training ranks, too, while they gather."""

    num_slots: int = 2
    """Snapshots of the local shards that may be alive at once, at least 2: one is sent
    while the next is filled. On CPU versions are sent from their slots, so there are as many
    more as ``weight_sync.max_versions`` allows, all of them in memory from the start."""

    master_address: str = "auto"
    """Address under which servers reach rank 0. ``auto``: this host's address on the
    route to each server, which is 127.0.0.1 for a server on this machine."""

    timeout_seconds: float = 120.0
    """Bound of joining a server's groups, of each bucket, and of what either side takes to
    rate the tokens of an attestation."""

    push_timeout_seconds: float = 600.0
    """Bound of one push to one server. A server that takes longer is given up, and joined
    anew."""

    retry_seconds: float = 1.0
    """Pause before a lost server is joined anew; it doubles with each failure in a row."""

    max_retry_seconds: float = 30.0
    """The pause grows no further than this."""

    transport: Literal["group", "disk"] = "group"
    """``group``: process groups between trainer and servers. ``disk``: safetensors files
    in ``weight_sync.disk_path``, for servers that share a filesystem with the trainer."""

    disk_path: str | None = None
    """Directory for ``transport = "disk"``, under one name on all hosts. Holds the newest
    versions only; empty it holds nothing else."""

    staging: Literal["auto", "device", "host"] = "auto"
    """Where snapshots lie: in the training device's memory or in pinned host memory.
    ``auto``: on the device."""

    max_versions: int = 0
    """Versions of the whole model, in wire dtype, that may be alive at once on the ranks
    that send: the newest, one being gathered, and those that slow servers still receive.
    0: as many as keep every server independent of the others, which is two more than
    servers. At least 2; with less than two more than servers, several slow servers
    together can hold up the others."""

    checksum: bool = False
    """Compare a checksum of each tensor where the server can (embedded, vLLM)."""

    attest_every: int = 200
    """Versions divisible by this are attested: the log-probabilities that a server gives
    fixed tokens must equal the trainer's. 0: only the server's version is compared."""

    attest_tolerance: float = 0.0
    """Largest mean difference of those log-probabilities. 0: 1e-3 where weights travel as
    float32, 0.05 where as bfloat16."""

    delta: bool = False
    """Send only the elements that changed since the version that a server has confirmed,
    where the server can apply them (embedded, vLLM). Lossless. Pays where the network is
    slower than memory."""
