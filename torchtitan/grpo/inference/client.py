# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The interface of inference servers, which `vllm/`, `sglang/` and `embedded/` implement.

A client holds one HTTP session, which belongs to the event loop of its first request.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan.grpo.types import GenerateRequest, Generation, TopTokens
from torchtitan.grpo.weight_wire.group_facts import GroupFacts
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo

SleepFrees = Literal["memory", "nothing"]
"""What a server frees while it sleeps: the memory of its weights and its cache, or nothing."""


class ServerError(RuntimeError):
    """A server failed or did not answer. The message names the route and what was expected."""

    was_answered = True
    """Whether the server answered, but did not do what it was asked."""


class LogprobsError(ServerError):
    """A completion came without usable log-probabilities of its tokens."""


@dataclass(frozen=True)
class ServerFacts:
    """Description of a server and its model; ``None`` stands for what the server does not tell.

    ``software`` is name and release, ``architecture`` the model's class in config.json. ``problems``
    prevent the run from using the server; ``warnings`` do not. ``sleep_frees`` matters only if the server
    is put to sleep.
    """

    software: str
    release: str | None = None
    model_path: str | None = None
    architecture: str | None = None
    vocab_size: int | None = None
    max_model_len: int | None = None
    sleep_frees: SleepFrees = "nothing"
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerLoad:
    """Running and waiting requests, and the used fraction of the KV cache, if the server reports it.

    ``prefill_seconds`` and ``decode_seconds`` are totals since the server's start; only their ratio counts.
    """

    running: int
    waiting: int
    kv_use: float | None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a server that depend on its kind and on how it was started.

    ``stops_for`` says when generation must be paused: for the whole ``transfer``, from the first bucket to
    the end of the commit; only for the ``commit``, if buckets are staged; or for ``nothing``, if the server
    commits between two of its steps. A server that ``receives_in_parallel`` takes buckets of different
    groups at the same time. One that ``receives_pieces`` takes a large bucket in several broadcasts over
    NCCL. One that ``rates_lists`` rates several sequences in one request.
    """

    stops_for: Literal["transfer", "commit", "nothing"] = "transfer"
    verifies_checksums: bool = False
    takes_deltas: bool = False
    receives_in_parallel: bool = False
    receives_pieces: bool = False
    rates_lists: bool = False


MAX_TOP_TOKENS = 256
"""Number of most likely tokens that a server of this project returns for each token: the largest
``teacher.top_k``, and as many tokens that a student does not have.
"""


@dataclass(frozen=True)
class PromptRating:
    """Logprobs of a sequence's tokens at temperature 1, and the most likely tokens if they were requested."""

    logprobs: list[float]
    top: TopTokens | None = None


class InferenceClient(ABC):
    """Access to one inference server.

    Every method raises :class:`ServerError` if the server fails or does not answer in time. Methods that
    wait in the server's queue, or receive or read weights, have a longer timeout than all others (the
    control timeout). ``capabilities`` are those of the kind until the client finds out more.
    """

    url: str
    capabilities: Capabilities = Capabilities()

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples one completion. If the call is cancelled, aborts the request on the server."""

    @abstractmethod
    async def abort(self, request_id: str | None) -> None:
        """Aborts one request, or all requests if ``request_id`` is ``None``."""

    @abstractmethod
    async def describe(self, temperature: float) -> ServerFacts:
        """Returns what the server tells about itself, without changing it.

        ``temperature`` is ``rollout.temperature``: a server may return usable logprobs for some values
        only. Raises :class:`WrongKind` if a server of another kind answers.
        """

    @abstractmethod
    async def health(self) -> None:
        """Raises ServerError unless the server is up. A paused server is up."""

    @abstractmethod
    async def version(self) -> int | None:
        """Returns the policy version that is served, or ``None`` before the first push."""

    @abstractmethod
    async def load(self) -> ServerLoad: ...

    @abstractmethod
    async def num_workers(self) -> int:
        """Returns the number of processes that hold weights (TP x PP)."""

    async def group_facts(self) -> list[GroupFacts]:
        """Returns facts of each worker that decide whether NCCL can work; unknown ones are ``None``."""
        return [GroupFacts()]

    @abstractmethod
    async def pause(self) -> None:
        """Stops generation. Running requests continue after :meth:`resume`."""

    @abstractmethod
    async def resume(self) -> None:
        """Makes a paused server generate again."""

    @abstractmethod
    async def sleep(self) -> SleepFrees:
        """Stops generation, and frees memory if the server can; returns what was freed.

        If ``memory`` was freed, the weights are lost: :meth:`version` is ``None`` until all weights (not a
        delta) were pushed after :meth:`wake`. Unfinished requests are aborted, or held until that push.
        Sleeping twice is the same as once.
        """

    @abstractmethod
    async def wake(self) -> None:
        """Allocates what :meth:`sleep` freed, so that weights can be pushed.

        A server that has lost its weights must get no requests until they were pushed. Waking a server
        that does not sleep has no effect.
        """

    @abstractmethod
    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        """Joins a group over which weights are sent; returns when all members have joined.

        The trainer must join at the same time. A server may be in one group for each sending rank.
        """

    @abstractmethod
    async def leave_weight_groups(self) -> None:
        """Drops an open update, and leaves all groups, also in the middle of a broadcast."""

    @abstractmethod
    async def begin_update(self) -> None:
        """Opens a weight update. An update that was left open is dropped first."""

    @abstractmethod
    async def receive_bucket(
        self, bucket: BucketSpec, *, group_name: str, last: bool, version: int
    ) -> None:
        """Makes the server receive one broadcast, which the trainer must send at the same time.

        Returns when the server has received the bucket, or has agreed to receive it. If it finds the bucket
        damaged later, it refuses the commit. ``last`` marks the last bucket of the update if buckets are
        sent one by one.
        """

    @abstractmethod
    async def commit_update(self, version: int) -> float:
        """Makes the server serve the weights that it received, and drop the KV caches of the old ones.

        Returns the seconds for which generation stopped. A server that the caller must pause does not
        report them, and returns 0.
        """

    @abstractmethod
    async def update_from_disk(self, path: str, version: int) -> float:
        """Makes the server serve a directory's safetensors files; returns as :meth:`commit_update`."""

    @abstractmethod
    async def rate(
        self, sequences: Sequence[list[int]], starts: Sequence[int], num_top: int = 0
    ) -> list[PromptRating]:
        """Returns the logprobs of sequences' tokens under the weights that are served now.

        ``starts`` holds the position of each sequence's first rated token, at least 1. For each rated
        token, the ``num_top`` most likely tokens at its position are returned as well.
        """

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Returns the log-probability of each token but the first; see :meth:`rate`."""
        (rating,) = await self.rate([token_ids], [1])
        return rating.logprobs

    async def served_checksums(self, dtype: str) -> dict[str, int] | None:
        """Returns the checksum of each served tensor (`checksum.py`) by its Hugging Face name.

        Returns ``None`` if the server cannot: it serves another ``dtype``, or fuses or packs tensors.
        """
        return None

    @abstractmethod
    async def close(self) -> None: ...
