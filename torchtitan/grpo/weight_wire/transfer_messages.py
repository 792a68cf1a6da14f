# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Describes a transfer to a server: the group to join, each bucket, and notes for SGLang.

HTTP clients import this module, so it does not need torch.
"""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class WeightGroupInfo:
    """Describes how a server joins one of the trainer's process groups for weights.

    The trainer has rank 0, and the server's workers those from ``rank_offset`` on. The group's name
    is unique. ``timeout_seconds`` bounds the rendezvous, and each collective. If ``deltas`` may be
    sent, a server that cannot read its own weights back (vLLM) keeps a copy of what it received, on
    the host. ``piece_bytes`` limits one broadcast over NCCL, so that neither side needs memory for a
    whole bucket on its GPU. With 0, each bucket is one broadcast, as SGLang requires.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_seconds: float
    deltas: bool = False
    piece_bytes: int = 0


@dataclass(frozen=True)
class BucketSpec:
    """Description of one bucket, which is broadcast as a single uint8 tensor.

    The payload holds the bytes of the tensors in this order, without padding. The payload of a
    delta holds changes instead; `sparse.py` defines its bytes.

    Attributes:
        names: Hugging Face parameter names.
        dtypes: Dtypes in which the tensors are sent, such as ``bfloat16``.
        shapes: Full (unsharded) shapes.
        checksums: Of each whole tensor's bytes (`checksum.py`); ``None`` if not compared.
        num_changed: For each tensor of a delta, the number of elements in the payload, or -1 if
            the tensor is sent whole. ``None`` if the bucket is not a delta.
        base_version: Version to which a delta is applied.
        lora_scale: ``alpha / rank`` of the low-rank adapters whose factors the bucket holds,
            under PEFT's names; ``None`` if it holds weights.
        lora_base: Digest of the base weights to which such adapters belong; see `adapters.py`.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    checksums: tuple[int, ...] | None = None
    num_changed: tuple[int, ...] | None = None
    base_version: int | None = None
    lora_scale: float | None = None
    lora_base: str | None = None


_PREFIX = "torchtitan_grpo.adapters:"


@dataclass(frozen=True)
class AdapterNote:
    """What a server must know of a bucket of adapters; ``index`` counts buckets from 0.

    SGLang's route has no field for this note, which is therefore sent in place of the load format:
    SGLang hands that string to its scheduler unchanged.
    """

    index: int
    is_last: bool
    lora_scale: float
    lora_base: str

    def as_load_format(self) -> str:
        return _PREFIX + json.dumps(asdict(self), allow_nan=False)


PROBE = f"{_PREFIX}probe"
"""In place of a note: asks whether the server understands notes. Nothing is received."""
READY = "torchtitan_grpo adds adapters to the base weights here."
"""Message with which a server that understands notes answers :data:`PROBE`."""


def note_of(load_format: str | None) -> AdapterNote | None:
    if load_format is None or not load_format.startswith(_PREFIX):
        return None
    try:
        return AdapterNote(**json.loads(load_format.removeprefix(_PREFIX)))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(
            f"load_format must hold a note of this release of torchtitan-grpo ({error}), got "
            f"{load_format[:200]!r}. Install the same release beside trainer and server."
        ) from error
