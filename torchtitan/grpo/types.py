# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What crosses package borders: prompts, rollouts, groups, requests to servers.

Plain data, no torch: the rollout process, the inference clients and the training
ranks all import this module.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
"""``stop``: a stop token was written; ``length``: ``max_new_tokens`` were written;
``abort``: the server gave the request up, and the completion may be short."""

ServerKind = str
"""Name of a kind of inference server: a row of `inference/kinds.py`."""


@dataclass(frozen=True)
class ServerInfo:
    """A server of this run.

    Attributes:
        url: Base URL, without a closing slash.
        kind: ``inference.kind``.
        num_joined: How often a server of this URL has joined the run. It tells one that left
            and came back, which must be attested anew, from one that stayed.
    """

    url: str
    kind: ServerKind
    num_joined: int = 1


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt set, tokenised once.

    Attributes:
        index: Position in the shuffled, repeating stream of prompts. Unique in a
            run, so it also names the prompt group.
        text: What the reward functions receive as ``prompts``: a string, or a list of
            chat messages where the data set is conversational.
        token_ids: [prompt_len] int32, what the server receives.
        columns: The row's remaining columns, passed to reward functions by name.
    """

    index: int
    text: str | list[dict[str, str]]
    token_ids: np.ndarray
    columns: dict[str, Any]


@dataclass(frozen=True)
class PromptProgress:
    """How far a run is through its stream of prompts, between two batches.

    Attributes:
        position: All indices below it were handed out, and none from it on.
        open: Those that were, and are neither trained nor closed; ascending. A resumed run
            begins with them.
    """

    position: int = 0
    open: tuple[int, ...] = ()


class BatchPart(IntEnum):
    """Which part of its batch a set of rollout groups is.

    A batch arrives whole, or in parts (``rollout.stream``): a first one, any number of middle
    ones, a last one. Where the rollout process was killed in the middle of a batch, the batch
    is delivered anew, so a part that begins a batch makes the parts before it void.

    Example: the parts of a batch that is interrupted after its second part::

        FIRST  MIDDLE  (killed)  FIRST  MIDDLE  LAST
    """

    WHOLE = 0
    FIRST = 1
    MIDDLE = 2
    LAST = 3

    @classmethod
    def at(cls, *, begins_batch: bool, ends_batch: bool) -> "BatchPart":
        """Returns the part with this place in its batch."""
        if begins_batch:
            return cls.WHOLE if ends_batch else cls.FIRST
        return cls.LAST if ends_batch else cls.MIDDLE

    @property
    def begins_batch(self) -> bool:
        """True for the only or the first part of a batch."""
        return self in (BatchPart.WHOLE, BatchPart.FIRST)

    @property
    def ends_batch(self) -> bool:
        """True for the only or the last part of a batch: the batch is complete with it."""
        return self in (BatchPart.WHOLE, BatchPart.LAST)


@dataclass(frozen=True)
class VersionSegment:
    """Tokens ``[start, end)`` of a completion were sampled under ``version``."""

    version: int
    start: int
    end: int


def num_sampled(token_ids: np.ndarray, sampled: np.ndarray | None) -> int:
    """Tokens of a completion that are trained, by its ``sampled``."""
    return len(token_ids) if sampled is None else int(np.count_nonzero(sampled))


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to sample.

    Attributes:
        request_id: Unique; by it the request can be aborted.
        prompt_ids: Token ids, at least one, all below the model's vocabulary size.
        max_new_tokens: Upper bound of the completion's length, at least 1.
        temperature: 0 is greedy decoding.
        top_p: Nucleus bound in (0, 1]; 1 is off.
        top_k: Number of most likely tokens kept; -1 is off.
        stop_token_ids: Tokens that end the completion; the stop token is part of it.
        ignore_eos: Write ``max_new_tokens`` tokens whatever the model says.
    """

    request_id: str
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Generation:
    """A server's answer to a :class:`GenerateRequest`, token-exact.

    Attributes:
        token_ids: [completion_len] int32, as the server sampled them, the stop token
            included.
        logprobs: [completion_len] float32, of each sampled token at sampling time,
            after temperature. With top-p or top-k set, vLLM's are renormalised over the
            tokens kept; SGLang's and the embedded server's are not. Either way they are
            then biased against what the trainer scores.
        finish_reason: See :data:`FinishReason`.
        segments: Which weights wrote which tokens, in order, without gaps. What an environment
            put in belongs to the segment before it.
        sampled: [completion_len] bool, True where the model wrote the token and False where an
            environment put it in, or where the policy that wrote it is too old to learn from
            (``rollout.overdue``), with a logprob of 0; None where all is trained.
        environment_reward: Sum of the rewards that the environment has given; None without any.
        num_context: Of the tokens that are not trained, how many a model wrote.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    segments: tuple[VersionSegment, ...]
    sampled: np.ndarray | None = None
    environment_reward: float | None = None
    num_context: int = 0

    @property
    def num_written(self) -> int:
        """Tokens that the model wrote, trained or not: the completion's length to its reader."""
        return num_sampled(self.token_ids, self.sampled) + self.num_context


@dataclass(frozen=True)
class Rollout:
    """One sampled and scored completion.

    Attributes:
        prompt_ids: [prompt_len] int32.
        completion_ids: [completion_len] int32.
        generator_logprobs: [completion_len] float32, recorded at sampling time.
        segments: Which policy version wrote which completion tokens.
        finish_reason: See :data:`FinishReason`.
        completion: The decoded text, for logs only; it is never tokenised again.
        reward: Weighted sum of the reward functions, or None where scoring failed:
            an unscored sample is left out, never counted as zero.
        reward_components: Each reward function's own value, by its name.
        sampled: [completion_len] bool; see :class:`Generation`. Only where it is True is a
            token trained; the others are context.
        num_context: Of those others, how many a model wrote.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    generator_logprobs: np.ndarray
    segments: tuple[VersionSegment, ...]
    finish_reason: FinishReason
    completion: str
    reward: float | None
    reward_components: dict[str, float] = field(default_factory=dict)
    sampled: np.ndarray | None = None
    num_context: int = 0

    @property
    def num_trained(self) -> int:
        """Tokens that are trained."""
        return num_sampled(self.completion_ids, self.sampled)

    @property
    def num_written(self) -> int:
        """Tokens that the model wrote, trained or not: the completion's length to its reader."""
        return self.num_trained + self.num_context

    @property
    def oldest_version(self) -> int:
        """The lowest policy version that wrote a trained token; its age is the staleness."""
        sampled = self.sampled
        trained = [s for s in self.segments if sampled is None or sampled[s.start : s.end].any()]
        return min(segment.version for segment in trained or self.segments)


@dataclass(frozen=True)
class RolloutGroup:
    """All rollouts of one prompt.

    Attributes:
        group_id: The prompt's ``index``.
        prompt_text: For logs.
        rollouts: At least one; ``grpo.group_size`` unless some failed.
        server_url: Where they were written.
    """

    group_id: int
    prompt_text: str
    rollouts: tuple[Rollout, ...]
    server_url: str
