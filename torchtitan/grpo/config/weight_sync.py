# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[weight_sync]`` table: how weights travel from the trainer to the servers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least


@dataclass
class WeightSync:
    """``[weight_sync]``: how weights are sent from the trainer to the servers."""

    transport: Literal["auto", "nccl", "host", "disk"] = "auto"
    """How weights are sent to the servers. ``nccl`` broadcasts from the GPUs of the source ranks.
    ``host`` sends from host memory over gloo; it uses neither NCCL nor the multiprocessors of a
    GPU, and works between any versions of torch. ``disk`` writes safetensors files to
    ``disk_path``, for servers that share a file system with the trainer. ``auto`` compares both
    ends when a server joins: it uses ``nccl`` if their NCCL versions and settings agree and they
    have different GPUs, and otherwise ``host``, with a warning that states the reason."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type in which weights are sent. ``auto`` uses ``training.mixed_precision_param``, the
    data type of the trainer's forward pass."""

    bucket_bytes: Annotated[int, at_least(1)] = 256 * 1024 * 1024
    """Approximate size of the buckets in which tensors are sent. A single tensor is never
    split. Servers reserve memory for one or two buckets. Over NCCL, each source rank also
    reserves one bucket for each server on its GPU. Measured by
    ``benchmarks/push_exactness.py``."""

    max_sources: Annotated[int, at_least(1).or_value(0, "all ranks")] = 8
    """Maximum number of ranks that send to each server at the same time, each approximately the
    same number of bytes. Each source rank has a connection to each server, so a higher number does
    not help in a cluster of hundreds of ranks. With pipeline parallelism, each pipeline rank has at
    least one source."""

    master_address: str = "auto"
    """Address at which servers reach rank 0. ``auto`` uses the address of this host on the route to
    each server, which is 127.0.0.1 for a server on the same machine."""

    timeout_seconds: Annotated[float, above(0)] = 120.0
    """Maximum time for each of the following: connecting to a server, sending one bucket, and
    computing the log-probabilities of an attestation on either side."""

    push_timeout_seconds: Annotated[float, above(0)] = 600.0
    """Maximum duration of one push to one server. A server that takes longer is disconnected, and
    the trainer then reconnects to it."""

    retry_seconds: Annotated[float, above(0)] = 1.0
    """Delay before the trainer reconnects to a lost server. It doubles with each failure in a
    row. Measured by ``benchmarks/torn_free.py``."""

    max_retry_seconds: Annotated[float, above(0)] = 10.0
    """Maximum of the delay that starts at ``retry_seconds``. Measured by
    ``benchmarks/torn_free.py``."""

    disk_path: str | None = None
    """Experimental: Directory for ``transport = "disk"``, with the same path on all hosts. The
    run creates it if necessary and keeps only the newest versions in it. It must not be shared
    with another run."""

    max_versions: Annotated[int, at_least(2).or_value(0, "the number of servers plus two")] = 0
    """Maximum number of versions of the whole model that may exist at once on the source ranks: the
    newest version, the one that is being gathered, and those that are still being sent to slow
    servers. All are in host memory, and allocated at the start. If it is less than the number of servers plus two, several slow servers together can
    delay the others."""

    checksum: bool = False
    """Compare a checksum of each tensor on the server with the trainer's. Only supported by
    embedded and vLLM servers. Measured by ``benchmarks/torn_free.py``."""

    attest_every: Annotated[int, at_least(1).or_value(0, "never")] = 200
    """Every version that is a multiple of this number is attested: the server computes
    log-probabilities of fixed tokens, which must equal the trainer's. An embedded server whose dtype
    is that of the push also computes checksums of the tensors that it serves, which must equal those
    of the tensors that were sent. For all other versions, only the version number that the server
    reports is compared."""

    delta: bool = False
    """Send only the elements that have changed since the version that a server has confirmed.
    The result is exact. This is worthwhile if the network is slower than memory. Only supported
    by embedded and vLLM servers. Measured by ``benchmarks/weight_delta.py``."""
