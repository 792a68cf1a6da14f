# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The interface of inference servers, which `vllm/client.py`, `sglang/client.py` and `embedded/client.py` implement.

The rollout process samples completions with it, and the trainer's weight synchronization uses the
rest. Both call it from asyncio code. A client holds one HTTP session, which belongs to the event loop
of its first request.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan.grpo.types import GenerateRequest, Generation, TopTokens
from torchtitan.grpo.weight_wire.group_facts import GroupFacts
from torchtitan.grpo.weight_wire.transfer_messages import BucketSpec, WeightGroupInfo


class ServerError(RuntimeError):
    """A server answered with an error, with a wrong answer, or not at all.

    The message names its URL and route, what was expected, and what was received.
    """

    @property
    def was_answered(self) -> bool:
        """Whether the server answered, and did not do what it was asked."""
        return True


class LogprobsError(ServerError):
    """A completion came without usable log-probabilities of its tokens."""


@dataclass(frozen=True)
class ServerFacts:
    """A server's description of itself and its model; ``None`` stands for what it does not tell.

    Attributes:
        software: Name and release, such as ``vLLM 0.32.0``, for messages.
        release: Only the release number.
        model_path: Directory or name that the server loaded the model from.
        architecture: Name of the model's class in config.json, such as ``Qwen3ForCausalLM``.
        vocab_size: Number of tokens in the model's vocabulary.
        max_model_len: Longest prompt and completion together, in tokens.
        problems: Each reason why this project cannot use the server as it was started.
        warnings: What the user should change, although the run can use the server.
    """

    software: str
    release: str | None = None
    model_path: str | None = None
    architecture: str | None = None
    vocab_size: int | None = None
    max_model_len: int | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerLoad:
    """How busy a server is: requests in its batch, requests in its queue, and the used part of its KV cache
    in [0, 1], which is ``None`` if the server does not report it.
    """

    running: int
    waiting: int
    kv_use: float | None


@dataclass(frozen=True)
class Capabilities:
    """What a server can do while weights are pushed to it.

    Attributes:
        stops_for: When generation must be paused: from the first bucket to the end of the
            commit (``transfer``); only for the commit, because buckets are staged until then
            (``commit``); or never, because the server itself commits between two of its steps
            (``nothing``).
        verifies_checksums: Whether the server compares the checksums of a bucket with those sent.
        takes_deltas: Whether the server can apply changes to the weights that it holds.
        receives_in_parallel: Whether buckets of different groups may be sent at the same time.
        receives_pieces: Whether a large bucket may be sent in several broadcasts over NCCL.
        rates_lists: Whether one request can ask for the logprobs of several sequences.
    """

    stops_for: Literal["transfer", "commit", "nothing"] = "transfer"
    verifies_checksums: bool = False
    takes_deltas: bool = False
    receives_in_parallel: bool = False
    receives_pieces: bool = False
    rates_lists: bool = False


MAX_TOP_TOKENS = 256
"""How many of the most likely tokens a server of this project returns for each token: the largest
``teacher.top_k``, and as many tokens that a student does not have."""


@dataclass(frozen=True)
class PromptRating:
    """How likely a server's model finds the tokens of a text, each given all before it, at temperature 1.

    ``top`` holds the model's most likely tokens at the place of each rated token, if they were asked for.
    """

    logprobs: list[float]
    top: TopTokens | None = None


class InferenceClient(ABC):
    """The trainer's and the rollout process's access to one inference server.

    Every method raises :class:`ServerError` if the server cannot do what it was asked, or does
    not answer within the control timeout that was given at construction. Methods that wait in the
    server's queue, or receive or read weights, have a longer timeout.

    Attributes:
        url: Base URL of the server.
        capabilities: Those of the kind's row in `kinds.py` until the client finds out more.
    """

    url: str
    capabilities: Capabilities = Capabilities()

    # The fields of `capabilities`, by the names that their readers use.
    @property
    def stops_for(self) -> Literal["transfer", "commit", "nothing"]:
        return self.capabilities.stops_for

    @property
    def verifies_checksums(self) -> bool:
        return self.capabilities.verifies_checksums

    @property
    def takes_deltas(self) -> bool:
        return self.capabilities.takes_deltas

    @property
    def receives_in_parallel(self) -> bool:
        return self.capabilities.receives_in_parallel

    @property
    def receives_pieces(self) -> bool:
        return self.capabilities.receives_pieces

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples one completion. If the call is cancelled, aborts the request on the server.

        Implemented by :class:`VLLMClient`, and by :class:`SGLangClient` also for embedded servers.
        """

    @abstractmethod
    async def abort(self, request_id: str | None) -> None:
        """Aborts one request, or all requests if ``request_id`` is ``None``."""

    @abstractmethod
    async def describe(self, temperature: float) -> ServerFacts:
        """Returns what the server tells about itself. Nothing is changed on it.

        A server may report suitable log-probabilities only at some values of ``rollout.temperature``.
        :class:`WrongKind` is raised if the URL is not that of a server of this kind.
        """

    @abstractmethod
    async def health(self) -> None:
        """Returns if the server is up, even if it is paused."""

    @abstractmethod
    async def version(self) -> int | None:
        """Returns the policy version that is served, or ``None`` before the first push."""

    @abstractmethod
    async def load(self) -> ServerLoad: ...

    @abstractmethod
    async def num_workers(self) -> int:
        """Returns the number of processes that hold weights (TP x PP)."""

    async def group_facts(self) -> list[GroupFacts]:
        """Returns what weight groups over NCCL depend on, for each worker; facts are ``None`` if it is not told."""
        return [GroupFacts()]

    @abstractmethod
    async def pause(self) -> None:
        """Stops generation. Running requests are kept and continue after :meth:`resume`."""

    @abstractmethod
    async def resume(self) -> None:
        """Makes a server generate again, if it is paused."""

    @abstractmethod
    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        """Makes the server join a process group; returns when all members have joined.

        The trainer must join at the same time. A server may be in several groups, one for each rank
        that sends weights.
        """

    @abstractmethod
    async def leave_weight_groups(self) -> None:
        """Drops an open update, and leaves all groups. A broadcast that the server waits for is ended."""

    @abstractmethod
    async def begin_update(self) -> None:
        """Opens a weight update. An update that was left open is dropped first."""

    @abstractmethod
    async def receive_bucket(
        self, bucket: BucketSpec, *, group_name: str, last: bool, version: int
    ) -> None:
        """Makes the server receive one broadcast over one of its groups.

        The trainer must broadcast at the same time. Returns when the server has received the
        bucket or has accepted to receive it. A server that finds the bucket damaged later
        refuses the commit. ``last`` marks the last bucket of the update, if buckets are sent one
        after another.
        """

    @abstractmethod
    async def commit_update(self, version: int) -> float:
        """Makes the server serve the weights that it received, without caches of the old ones.

        Returns the seconds for which generation stopped, or 0 if the server does not report them.
        Such a server must be paused by the caller.
        """

    @abstractmethod
    async def update_from_disk(self, path: str, version: int) -> float:
        """Makes the server read and serve the safetensors files of a directory, as an update by itself.

        Returns what :meth:`commit_update` returns.
        """

    @abstractmethod
    async def rate(
        self, sequences: Sequence[list[int]], starts: Sequence[int], num_top: int = 0
    ) -> list[PromptRating]:
        """Returns how likely the tokens of sequences are under the weights that are served now.

        It is one request if the server takes lists (``capabilities.rates_lists``), and otherwise
        one request after another.

        Args:
            sequences: Token ids.
            starts: Position of the first rated token of each sequence, at least 1.
            num_top: Number of the most likely tokens that are returned for each rated token.
        """

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Returns the log-probability of each token but the first; see :meth:`rate`."""
        (rating,) = await self.rate([token_ids], [1])
        return rating.logprobs

    @abstractmethod
    async def close(self) -> None: ...
