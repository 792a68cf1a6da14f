# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The interface behind which every kind of inference server stands.

Generation is used by the rollout process, everything else by the weight pusher; both
are asyncio code. A client holds one HTTP session and belongs to the event loop that it
was first used in.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from torchtitan.grpo.types import GenerateRequest, Generation
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo


class ServerError(RuntimeError):
    """A server answered with an error, with nonsense, or not at all.

    The message names the server's URL, the route, what was expected and what came.
    """


@dataclass(frozen=True)
class ServerLoad:
    """How busy a server is, by its own word.

    Attributes:
        running: Requests that are being written.
        waiting: Requests that wait for room.
        kv_use: Part of its memory for keys and values that is taken, in [0, 1]; None where
            the server does not tell.
    """

    running: int
    waiting: int
    kv_use: float | None


@dataclass(frozen=True)
class Capabilities:
    """What a server can do while weights are pushed to it.

    Attributes:
        stops_for: When generation must be paused: from the first bucket to the end of the
            commit (``transfer``); for the commit alone, because buckets are staged until then
            (``commit``); or never, because the server itself commits between two of its steps
            (``nothing``).
        verifies_checksums: Whether the server compares the checksums of a bucket.
        takes_deltas: Whether the server can apply changes to the weights that it holds.
    """

    stops_for: Literal["transfer", "commit", "nothing"] = "transfer"
    verifies_checksums: bool = False
    takes_deltas: bool = False


class InferenceClient(ABC):
    """One inference server.

    Every method raises :class:`ServerError` when the server cannot do what was asked,
    and none waits longer than the timeout given at construction. ``generate`` and
    ``prompt_logprobs``, which wait their turn on the server, have a longer one.

    Attributes:
        url: Base URL of the server.
        capabilities: What the server can do. They are those of the kind's row in `kinds.py`
            until the client finds out more about its server.
    """

    url: str
    capabilities: Capabilities = Capabilities()

    @property
    def stops_for(self) -> Literal["transfer", "commit", "nothing"]:
        """See :class:`Capabilities`."""
        return self.capabilities.stops_for

    @property
    def verifies_checksums(self) -> bool:
        """See :class:`Capabilities`."""
        return self.capabilities.verifies_checksums

    @property
    def takes_deltas(self) -> bool:
        """See :class:`Capabilities`."""
        return self.capabilities.takes_deltas

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
    async def load(self) -> ServerLoad:
        """How busy the server is, whoever keeps it so. Asked about once a second."""

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

        The trainer must join at the same time, from another thread or task. A server may
        be in several groups: one for each rank that sends weights.
        """

    @abstractmethod
    async def leave_weight_groups(self) -> None:
        """Drops an open update and makes the server forget its groups.

        Harmless when it has none. A broadcast that the server waits for ends.
        """

    @abstractmethod
    async def begin_update(self) -> None:
        """Opens a weight update, after closing one that was left open."""

    @abstractmethod
    async def receive_bucket(
        self, bucket: BucketSpec, *, group_name: str, last: bool, version: int
    ) -> None:
        """Makes the server receive one broadcast, over one of its groups.

        Returns when the server has taken the bucket, or is certain to: what it finds wrong
        after that, it says at the commit. The trainer broadcasts at the same time.

        Args:
            bucket: What will be broadcast.
            group_name: Which of the groups; see :class:`WeightGroupInfo`.
            last: True for the last bucket of the update.
            version: Policy version of the update.
        """

    @abstractmethod
    async def commit_update(self, version: int) -> float:
        """Makes the server serve what it was sent; returns the seconds it stood still.

        Caches of the old weights are thrown away. Returns 0 where the server cannot tell;
        it must then have been paused by the caller.
        """

    @abstractmethod
    async def update_from_disk(self, path: str, version: int) -> float:
        """Makes the server serve the safetensors files of a directory, as a whole update.

        Returns what :meth:`commit_update` returns.
        """

    @abstractmethod
    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probability of each token but the first, given those before it.

        At temperature 1, under the weights served now; [len(token_ids) - 1].
        """

    @abstractmethod
    async def close(self) -> None:
        """Closes the HTTP session."""
