# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The parameters of the model by their Hugging Face names.

On a CPU, new tensors replace the old ones, and nothing is copied. On a GPU, the parameters keep
their addresses, because captured CUDA graphs contain these (`decode_graph.py`). A weight is copied twice:

    staging thread   pinned bucket -> staged tensor   on the table's stream, during decoding
    engine's thread  staged tensor -> parameter       on the decoding stream, between two steps

The second copy stays on the GPU and reads and writes every byte once: 10 ms for 16 GB at 3.35 TB/s.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch

from torchtitan.grpo.system.device import new_stream
from torchtitan.grpo.weight_wire.buckets import aligned
from torchtitan.grpo.weight_wire.checksum import tensor_checksum


class Residence(Enum):
    """The state of the weights::

    SERVED --sleep--> ASLEEP --wake--> EMPTY --all weights pushed--> SERVED
                         ^               |
                         +---- sleep ----+

    The server takes requests only in the state SERVED, and updates in SERVED and EMPTY.
    """

    SERVED = "served"
    ASLEEP = "asleep"
    EMPTY = "empty"

    @property
    def refusal(self) -> str | None:
        """Why requests are refused and what to do about it, or ``None`` in the state ``SERVED``."""
        if self is Residence.ASLEEP:
            return (
                "The server is asleep. Send POST /resume_memory_occupation, and then push all of the "
                "weights."
            )
        if self is Residence.EMPTY:
            return "The server has slept and holds no weights. Push all of the weights first."
        return None


class WeightTable:
    """The parameters of a model by name. A tied parameter is listed under each of its names."""

    def __init__(self, model: torch.nn.Module) -> None:
        # The parameters themselves, not detached ones, because their storage will be replaced.
        self.parameters: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._device = next(iter(self.parameters.values())).device
        # Of the copies to the GPU.
        self.stream = new_stream(self._device) if self._device.type == "cuda" else None

    def check(self, names: Iterable[str], shapes: Iterable[Sequence[int]]) -> None:
        """Raises ValueError unless every tensor described fits the model."""
        names = list(names)
        unknown = [name for name in names if name not in self.parameters]
        if unknown:
            raise ValueError(
                f"Parameter names must be the model's Hugging Face names, such as "
                f"{next(iter(self.parameters))!r}; {len(unknown)} of {len(names)} are not the "
                f"model's: {unknown[:3]}."
            )
        if len(set(names)) < len(names):
            raise ValueError("A parameter name occurs twice in one update.")
        for name, shape in zip(names, shapes, strict=True):
            expected = list(self.parameters[name].shape)
            if list(shape) != expected:
                raise ValueError(f"{name}: shape must be {expected}, got {list(shape)}.")

    def missing(self, names: Collection[str]) -> list[str]:
        """Returns the names of parameters that ``names`` does not cover. Any name covers a tied parameter."""
        covered = {id(self.parameters[name]) for name in names}
        return [n for n, p in self.parameters.items() if id(p) not in covered]

    def in_wire_dtype(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.parameters[name].detach().to(dtype, copy=True)

    @torch.no_grad()
    def prepared(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to the model's device and dtype for :meth:`adopt`. See :meth:`wait_prepared`."""
        held = self.parameters[name]
        with self.on_stream():
            # Moved first, so that the GPU casts, and a pinned tensor needs no other host memory.
            moved = tensor.to(device=held.device, non_blocking=True)
            return aligned(moved.to(held.dtype))

    def on_stream(self) -> AbstractContextManager[Any]:
        if self.stream is None:
            return nullcontext()
        torch.cuda.set_device(self._device)  # each thread has its own current device
        return torch.cuda.stream(self.stream)

    def wait_prepared(self) -> None:
        """Waits for the copies of :meth:`prepared`, so that decoding need not wait for them."""
        if self.stream is not None:
            with self.on_stream():
                self.stream.synchronize()

    @torch.no_grad()
    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replaces parameters by prepared tensors. Later work on the current stream uses the new ones."""
        if self.stream is None:
            for name, tensor in tensors.items():
                self.parameters[name].data = tensor
            return
        decoding = torch.cuda.current_stream(self._device)
        decoding.wait_stream(self.stream)
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)
        # The memory of the tensors is the stream's, for the next version to be copied to.
        self.stream.wait_stream(decoding)

    def release(self) -> None:
        """Frees the memory of the weights, but keeps their names, shapes and dtypes."""
        self._replace(lambda held: held.new_zeros(()).expand(held.shape))

    def allocate(self) -> None:
        """On a GPU, allocates memory for new weights. On a CPU, :meth:`adopt` uses the memory of the new ones."""
        if self.stream is not None:
            self._replace(lambda held: held.new_empty(held.shape))

    def _replace(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        # Tied weights are one parameter under several names. The engine's thread runs this in inference
        # mode, whose tensors could not be replaced by others later.
        with torch.inference_mode(False), torch.no_grad():
            for held in {id(p): p for p in self.parameters.values()}.values():
                held.data = make(held.data)

    def checksums(self) -> dict[str, int]:
        """Returns the checksum (`checksum.py`) of each parameter as it is stored, in the model's dtype."""
        return {name: tensor_checksum(p) for name, p in self.parameters.items()}
