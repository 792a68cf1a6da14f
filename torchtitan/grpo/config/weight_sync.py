# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[weight_sync]`` table: how weights travel from the trainer to the servers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class WeightSync:
    """``[weight_sync]``: how weights travel from the trainer to the servers."""

    transport: Literal["auto", "nccl", "host", "disk"] = "auto"
    """How weights travel. ``nccl`` broadcasts from the GPUs of the source ranks. ``host`` sends from
    host memory over gloo, which uses neither NCCL nor the multiprocessors of a GPU and works between
    any versions of torch. ``disk`` writes safetensors files to ``disk_path``, for servers that share
    a file system with the trainer. ``auto`` compares both ends when a server joins: it takes
    ``nccl`` if their versions and settings of NCCL agree and they have GPUs of their own, and
    ``host`` otherwise, with a warning that says why."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type in which weights are sent. ``auto`` takes ``training.mixed_precision_param``, the
    type in which the trainer's own forward pass computes."""

    bucket_bytes: Annotated[int, at_least(1)] = 256 * 1024 * 1024
    """Approximate size of the buckets in which tensors are sent. A single tensor is never split.
    Servers reserve memory for one or two buckets. Over NCCL, so does each source rank on its GPU,
    one bucket for each server."""

    max_sources: Annotated[int, at_least(1).or_value(0, "all ranks")] = 8
    """Maximum number of ranks that send to each server at the same time. The ranks that hold the
    weights share them so that each sends equally many bytes, over as many hosts as possible. Each
    has a connection with each server, so a cluster of hundreds of ranks gains nothing from more. A
    pipeline has at least one for each of its ranks."""

    num_slots: Annotated[int, at_least(2)] = 2
    """Number of snapshots of the local shards that may exist at once: one is sent while the next is
    filled. Versions are sent directly from their slots, so that as many slots are added as
    ``max_versions`` allows versions. All slots lie in host memory and are allocated at the start."""

    master_address: str = "auto"
    """Address at which servers reach rank 0. ``auto`` takes the address of this host on the route to
    each server, which is 127.0.0.1 for a server on the same machine."""

    timeout_seconds: Annotated[float, above(0)] = 120.0
    """Maximum time for connecting to a server, for sending one bucket, and for computing the
    log-probabilities of an attestation on either side."""

    push_timeout_seconds: Annotated[float, above(0)] = 600.0
    """Maximum duration of one push to one server. A server that takes longer is disconnected, and
    the trainer then connects to it again."""

    retry_seconds: Annotated[float, above(0)] = 1.0
    """Pause before the trainer connects again to a server that it lost. It doubles with each failure
    in a row."""

    max_retry_seconds: Annotated[float, above(0)] = 10.0
    """Upper bound of the pause that grows from ``retry_seconds``."""

    disk_path: str | None = None
    """Directory for ``transport = "disk"``, under the same name on all hosts. The run creates it if
    need be, keeps only the newest versions in it, and shares it with no other run."""

    max_versions: Annotated[
        int, at_least(2).or_value(0, "two more than servers, which keeps servers independent")
    ] = 0
    """Maximum number of versions of the whole model that may exist at once on the ranks that send:
    the newest, the one that is being gathered, and those that are still being sent to slow servers.
    With fewer than two more than servers, several slow servers together can delay the others."""

    checksum: bool = False
    """Compare a checksum of each tensor on the server with the trainer's. Only embedded and vLLM
    servers can do so."""

    attest_every: Annotated[int, at_least(1).or_value(0, "never")] = 200
    """Every version that is a multiple of this is attested: the server computes log-probabilities of
    fixed tokens, which must equal the trainer's. For all other versions only the version number
    that the server reports is compared."""

    attest_tolerance: Annotated[
        float, above(0).or_value(0, "measured for each server at the start")
    ] = 0.0
    """Maximum mean difference between the log-probabilities of an attestation, in nats. 0 measures
    how much a server's kernels differ while both sides have the same weights, and allows three times
    as much, at least 1e-3 for float32 weights and 0.05 for bfloat16. A difference above 0.02 and 0.5
    is never explained by kernels."""

    delta: bool = False
    """Send only the elements that changed since the version that a server has confirmed. The result
    is exact. It pays off if the network is slower than memory. Only embedded and vLLM servers can
    apply such updates."""
