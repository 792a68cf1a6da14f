# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the trainer tells a server about a transfer: the group to join, and each bucket.

Plain data without torch, so that HTTP clients can import it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightGroupInfo:
    """How a server joins the trainer's process group for weights.

    Attributes:
        master_address: Host on which the trainer's store listens.
        master_port: Its port.
        rank_offset: Rank of the server's first worker; the trainer is rank 0.
        world_size: 1 plus the number of the server's workers.
        group_name: Unique for each connection.
        backend: ``gloo`` or ``nccl``.
        timeout_seconds: Bound of the rendezvous and of each collective.
        deltas: Whether deltas may follow. A server that cannot read its weights back
            (vLLM) then keeps a copy of what it was sent, on the host.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_seconds: float
    deltas: bool = False


@dataclass(frozen=True)
class BucketSpec:
    """Describes one bucket, broadcast as a single uint8 tensor.

    The bytes of the tensors follow one another in this order, without padding. A delta
    holds changes instead; see `weight_wire/sparse.py` for its bytes.

    Attributes:
        names: Hugging Face parameter names.
        dtypes: Wire dtypes, as ``float32`` or ``bfloat16``.
        shapes: Full (unsharded) shapes.
        checksums: Of each tensor's bytes, once it is whole; see `weight_wire/checksum.py`.
            None where the receiver is not to compare.
        num_changed: In a delta, how many elements of each tensor follow; -1 for a tensor
            that comes whole. None where all do.
        base_version: Version that a delta is against; None where all tensors come whole.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    checksums: tuple[int, ...] | None = None
    num_changed: tuple[int, ...] | None = None
    base_version: int | None = None
