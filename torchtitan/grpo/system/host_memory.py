# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Free host memory, pinned memory, and slots of memory that the ranks of a host share.

Shared memory is an anonymous file (``memfd``), which leaves no name behind and is freed when the last
process that has it mapped ends. All pages are touched when it is made or mapped. Otherwise the first
copy into a slot would fault in every page, which takes many times as long as a later copy.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

CAN_SHARE = hasattr(os, "memfd_create")
"""True if the system has memory files. Without them ranks send their shards."""

_CGROUP = Path("/sys/fs/cgroup")
_PINNED_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable
_SECRET_BYTES = 16


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Returns free bytes within the container's limit (cgroup v2); cached files are free."""
    free = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stats = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return free  # no limit, or no cgroup v2
    if limit == "max":
        return free
    return min(free, max(int(limit) - used + int(stats.get("inactive_file", 0)), 0))


def pin(
    tensors: Sequence[torch.Tensor],
    purpose: str = "weight snapshots",
    remedy: str = "lower weight_sync.max_versions",
) -> None:
    """Pins existing memory for good, so that a GPU's copy engines reach it without the CPU.

    Each process must pin its own mapping. Pinning waits for the device, so do it at a run's start. Raises
    RuntimeError if CUDA refuses, for instance because of the limit of locked memory.
    """
    cudart: Any = torch.cuda.cudart()
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        result = cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PINNED_FOR_ALL_CONTEXTS)
        if int(result) != 0:
            raise RuntimeError(
                f"{tensor.nbytes / 1024**3:.2f} GiB of host memory must be pinned for "
                f"{purpose}, but CUDA refused (cudaError {int(result)}). Allow the container to "
                f"lock memory (docker run --ulimit memlock=-1), or {remedy}."
            )


def own_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype).zero_()


@dataclass(frozen=True)
class SlotOffer:
    """What another rank of this host needs to map this rank's slots, which lie one after another in a file.

    On another host, ``path`` may name a different file. Therefore the right file ends with ``secret``.
    """

    path: str
    secret: bytes
    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        return self.slot_bytes * self.num_slots + _SECRET_BYTES

    def slots_in(self, memory: mmap.mmap) -> list[torch.Tensor]:
        """Returns each slot as a [slot_bytes] uint8 tensor, which keeps the memory mapped."""
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return list(flat[:-_SECRET_BYTES].split(self.slot_bytes))


class SharedSlots:
    """New slots of shared memory, uint8 zeros [slot_bytes]. Other ranks map them with the ``offer``."""

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self._file = os.memfd_create("grpo-snapshot-slots")
        self.offer = SlotOffer(
            path=f"/proc/{os.getpid()}/fd/{self._file}",
            secret=secrets.token_bytes(_SECRET_BYTES),
            slot_bytes=slot_bytes,
            num_slots=num_slots,
        )
        os.ftruncate(self._file, self.offer.num_bytes)
        memory = _mapped(self._file, self.offer.num_bytes)
        memory[-_SECRET_BYTES:] = self.offer.secret
        self.slots = self.offer.slots_in(memory)

    def close(self) -> None:
        """Ends the offer: no further process can map the slots. Existing mappings stay."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def attach(offer: SlotOffer) -> list[torch.Tensor] | None:
    """Maps the slots of another rank. Returns None if its host, container or user differs from this rank's."""
    try:
        file = os.open(offer.path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != offer.num_bytes:
            return None
        memory = _mapped(file, offer.num_bytes)
    except (OSError, ValueError):  # the path names something that cannot be mapped
        return None
    finally:
        os.close(file)
    if memory[-_SECRET_BYTES:] != offer.secret:
        return None
    return offer.slots_in(memory)


def _mapped(file: int, num_bytes: int) -> mmap.mmap:
    return mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
