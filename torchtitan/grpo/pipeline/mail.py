# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tensors on their way from pass to pass, on one rank or between two."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchtitan.grpo.system import spans

Key = tuple[int, str, int]
"""The pass that takes the tensors: its part, its direction and its microbatch."""


class Mail:
    """Holds each tensor until it is taken or has been sent. Peers are ranks within ``group``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._here: dict[Key, tuple[torch.Tensor, ...]] = {}
        self._arriving: dict[Key, list[dist.Work]] = {}
        self._leaving: list[tuple[dist.Work, torch.Tensor]] = []

    def put(self, key: Key, tensors: tuple[torch.Tensor, ...]) -> None:
        self._here[key] = tensors

    def take(self, key: Key) -> tuple[torch.Tensor, ...]:
        wait_for(self._arriving.pop(key, []), "receive", key[0], key[2])
        return self._here.pop(key)

    def send(self, key: Key, peer: int) -> None:
        """Begins to send ``peer`` the tensors that were put under this key."""
        self._leaving = [(work, t) for work, t in self._leaving if not work.is_completed()]
        for tensor in self._here.pop(key):
            tensor = tensor.contiguous()
            work = dist.isend(tensor, group=self._group, group_dst=peer)
            self._leaving.append((begun(work), tensor))

    def receive(
        self, key: Key, shapes: Sequence[tuple[torch.Size, torch.dtype]], peer: int
    ) -> None:
        """Begins to receive from ``peer`` the tensors that a pass of this rank takes under this key."""
        tensors = tuple(torch.empty(s, dtype=dtype, device=self._device) for s, dtype in shapes)
        self._here[key] = tensors
        self._arriving[key] = [
            begun(dist.irecv(tensor, group=self._group, group_src=peer)) for tensor in tensors
        ]

    def finish(self) -> None:
        wait_for([work for work, _ in self._leaving], "send")
        self._leaving.clear()
        assert not self._here, f"nobody took the tensors for {list(self._here)}"


def begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank outside the pipeline's group exchanged a tensor"
    return work


def wait_for(works: Sequence[dist.Work], what: str, stage: int = 0, microbatch: int = 0) -> None:
    """Waits until exchanges have ended. On a GPU, only the device waits."""
    if works:
        with spans.span("pipeline", what, stage=stage, microbatch=microbatch):
            for work in works:
                work.wait()
