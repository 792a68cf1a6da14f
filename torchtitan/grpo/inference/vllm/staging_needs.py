# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides where a vLLM worker has room to stage an update, without vLLM itself."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

# Staging needs the weights once more, and some memory to work in.
_ROOM_FACTOR = 1.2
# Torch pins memory in powers of two, so that a version may take almost twice its size.
_PINNED_FACTOR = 2.0
_GIB = 1024**3


@dataclass(frozen=True)
class StagingNeeds:
    """Bytes that a worker needs to stage an update, on its GPU or on the host.

    Every worker receives and stages the whole model, even if it serves only a part of it.
    ``on_host`` is the need of all workers of the server, which share the host's memory.
    """

    on_device: int
    on_host: int

    @classmethod
    def of(
        cls, parameter_bytes: Iterable[int], num_workers: int, *, deltas: bool
    ) -> "StagingNeeds":
        """Returns the needs of one of ``num_workers`` that hold equal parts of the model.

        ``deltas`` tells that the previous version is kept on the host.
        """
        model = sum(parameter_bytes) * num_workers
        copies = _PINNED_FACTOR * (1 + deltas) * num_workers
        return cls(int(_ROOM_FACTOR * model), int(copies * model))

    def are_met_on_host(self, device: torch.device, free: int, free_on_host: int) -> bool:
        """Returns True for the host and False for the device, which is preferred.

        Raises RuntimeError if neither has room. The client looks for "no room to stage" in the
        message.
        """
        if free >= self.on_device:
            return False
        if free_on_host >= self.on_host:
            return True
        raise RuntimeError(
            f"There is no room to stage weights: {self.on_device / _GIB:.2f} GiB must be free on "
            f"{device}, and {free / _GIB:.2f} GiB are; or {self.on_host / _GIB:.2f} GiB of host "
            f"memory must be free for all workers, and {free_on_host / _GIB:.2f} GiB are. Lower "
            "--gpu-memory-utilization, or give the server more host memory, so that weights can be "
            "received while vLLM generates."
        )
