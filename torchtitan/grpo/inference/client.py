# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The interface behind which every kind of inference server stands.

Generation is used by the rollout process, everything else by the weight pusher; both
are asyncio code. A client holds one HTTP session and belongs to the event loop that it
was first used in.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torchtitan.grpo.types import GenerateRequest, Generation


class ServerError(RuntimeError):
    """A server answered with an error, with nonsense, or not at all.

    The message names the server's URL, the route, what was expected and what came.
    """


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
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_seconds: float


@dataclass(frozen=True)
class BucketSpec:
    """Describes one bucket, broadcast as a single uint8 tensor.

    The bytes of the tensors follow one another in this order, without padding.

    Attributes:
        names: Hugging Face parameter names.
        dtypes: Wire dtypes, as ``float32`` or ``bfloat16``.
        shapes: Full (unsharded) shapes.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class InferenceClient(ABC):
    """One inference server.

    Every method raises :class:`ServerError` when the server cannot do what was asked,
    and none waits longer than the timeout given at construction (``generate`` has a
    timeout of its own).
    """

    url: str

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples one completion. Aborts the request on the server when cancelled."""

    @abstractmethod
    async def abort(self, request_id: str | None) -> None:
        """Aborts one request, or all of them where ``request_id`` is None."""

    @abstractmethod
    async def health(self) -> None:
        """Returns when the server is up (it may be paused); raises otherwise."""

    @abstractmethod
    async def version(self) -> int | None:
        """The policy version the server says it serves; None before the first push."""

    @abstractmethod
    async def num_workers(self) -> int:
        """Number of processes of the server that hold weights (TP x PP)."""

    @abstractmethod
    async def pause(self) -> None:
        """Stops generation; running requests are kept and continue after :meth:`resume`."""

    @abstractmethod
    async def resume(self) -> None:
        """Continues generation. Harmless when the server is not paused."""

    @abstractmethod
    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        """Makes the server join; returns when the rendezvous is complete.

        The trainer must join at the same time, from another thread or task.
        """

    @abstractmethod
    async def leave_weight_group(self) -> None:
        """Makes the server forget its group. Harmless when it has none."""

    @abstractmethod
    async def begin_update(self) -> None:
        """Opens a weight update, after closing one that was left open."""

    @abstractmethod
    async def receive_bucket(self, bucket: BucketSpec, *, last: bool, version: int) -> None:
        """Makes the server receive one broadcast and load it.

        Returns when the bucket is loaded. The trainer broadcasts at the same time.

        Args:
            bucket: What will be broadcast.
            last: True for the last bucket of the update; caches are flushed with it.
            version: Policy version of the update.
        """

    @abstractmethod
    async def commit_update(self, version: int) -> None:
        """Closes the update and sets the server's version."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the HTTP session."""
