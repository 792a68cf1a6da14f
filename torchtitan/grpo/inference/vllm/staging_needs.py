# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Where a vLLM worker has room to stage an update, without vLLM itself."""

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
    """How many bytes a worker needs to stage an update.

    Every worker receives and stages the whole model, also if it serves only a part of it.

    Attributes:
        on_device: What it needs on its GPU.
        on_host: What all workers of the server, which share the host's memory, need together.
    """

    on_device: int
    on_host: int

    @classmethod
    def of(
        cls, parameter_bytes: Iterable[int], num_workers: int, *, deltas: bool
    ) -> "StagingNeeds":
        """Returns what one of the workers needs that the model is divided among.

        Args:
            parameter_bytes: Size of each parameter that the worker holds.
            deltas: Whether the version before is kept on the host.
        """
        model = sum(parameter_bytes) * num_workers
        copies = _PINNED_FACTOR * (1 + deltas) * num_workers
        return cls(int(_ROOM_FACTOR * model), int(copies * model))

    def are_met_on_host(self, device: torch.device, free: int, free_on_host: int) -> bool:
        """Returns whether updates are staged on the host: False if the device has room.

        Args:
            free: Its free bytes.
            free_on_host: Free bytes of host memory.

        Raises:
            RuntimeError: If neither place has room. The client looks for "no room to stage" in its
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
