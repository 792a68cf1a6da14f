# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Types that several packages use. Some processes that need them do not import torch, nor does this module.

Fields of :class:`Generation` and :class:`Rollout` that have a value for each token are annotated with
a :class:`Column`, which determines how they are joined, sent, saved and packed into rows.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended.

``stop``: the model wrote a stop token. ``length``: ``max_new_tokens`` tokens were written.
``abort``: the server ended the request early, so that the completion may be incomplete."""

ServerKind = str
"""Name of a kind of inference server: a row of `inference/kinds.py`."""


@dataclass(frozen=True)
class ServerInfo:
    """A server of the run.

    ``num_joined`` is how often this URL has joined the run. It reveals a server that left and came
    back, which must be attested again. ``software``, such as ``vLLM 0.32.0``, is empty until known.
    A server that is lent (:mod:`torchtitan.grpo.rollout.lending`) sleeps unless it ``is_wanted``.
    """

    url: str  # without a trailing slash
    kind: ServerKind
    num_joined: int = 1
    software: str = field(default="", compare=False)
    is_lent: bool = field(default=False, compare=False)
    is_wanted: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt set, tokenized once. Reward functions receive text and columns.

    Attributes:
        group_id: Position in the shuffled, repeating stream of prompts, unique in a run. For a
            held-out prompt, the number of its row in its set.
        text: A string, or a list of chat messages.
        token_ids: [prompt_len] int32, the prompt as the server receives it.
        row: Where the prompt's row is, such as ``train.jsonl:8``.
    """

    group_id: int
    text: str | list[dict[str, str]]
    token_ids: np.ndarray
    columns: dict[str, Any]
    row: str = ""


@dataclass(frozen=True)
class PromptProgress:
    """Position of a run in its stream of prompts, between two batches.

    ``position`` is that of the first prompt not handed out yet. A resumed run starts with the ``open``
    prompts, which were handed out but neither trained nor closed. They are in ascending order.
    """

    position: int = 0
    open: tuple[int, ...] = ()


class BatchPart(IntEnum):
    """Tells which part of its batch a set of rollout groups is.

    A batch arrives whole, or in parts (``rollout.stream``): a first one, any number of middle
    ones, and a last one. If the rollout process is killed in the middle of a batch, the batch is
    delivered again, so a part that begins a batch invalidates the parts before it.

    Example: the parts of a batch that is interrupted after its second part::

        FIRST  MIDDLE  (killed)  FIRST  MIDDLE  LAST
    """

    WHOLE = 0
    FIRST = 1
    MIDDLE = 2
    LAST = 3

    @classmethod
    def at(cls, *, begins_batch: bool, ends_batch: bool) -> "BatchPart":
        if begins_batch:
            return cls.WHOLE if ends_batch else cls.FIRST
        return cls.LAST if ends_batch else cls.MIDDLE

    @property
    def begins_batch(self) -> bool:
        return self in (BatchPart.WHOLE, BatchPart.FIRST)

    @property
    def ends_batch(self) -> bool:
        return self in (BatchPart.WHOLE, BatchPart.LAST)


class VersionSegment(NamedTuple):
    """Tokens ``[start, end)`` of a completion were sampled under ``version``."""

    version: int
    start: int
    end: int


NewRows = tuple[tuple[int, int], ...]
"""Where a completion goes on in another context, as ``(start, num_context)`` in ascending order.

From ``start`` on the model has seen neither the prompt nor the tokens before, but ``num_context``
tokens, which are part of the completion and not trained, and then what follows them. A chat template
that leaves out the thinking of earlier turns gives such contexts. Empty for all other completions.

Example: two turns, the first of which has thinking that the second does not see::

    prompt      q
    completion  <think> t </think> a <end>  q a <end> o  b <end>
    sampled     1       1 1        1 1      0 0 0     0  1 1
    new_rows    ((5, 4),)
"""


def without_contexts(token_ids: np.ndarray, new_rows: NewRows) -> np.ndarray:
    is_kept = np.ones(len(token_ids), np.bool_)
    for start, num_context in new_rows:
        is_kept[start : start + num_context] = False
    return token_ids[is_kept] if new_rows else token_ids


@dataclass(frozen=True)
class GenerateRequest:
    """Describes one completion that a server is to sample.

    ``unknown_ids`` are below the model's vocabulary size, but are not tokens of its tokenizer. They
    would vanish from the decoded text, so servers that can exclude them do not sample them.
    """

    request_id: str  # unique; aborts name it
    prompt_ids: list[int]  # at least one
    max_new_tokens: int  # at least 1
    temperature: float = 1.0  # 0 is greedy decoding
    top_p: float = 1.0  # in (0, 1]; 1 is off
    top_k: int = -1  # -1 is off
    stop_token_ids: tuple[int, ...] = ()  # the stop token is part of the completion
    ignore_eos: bool = False
    seed: int | None = None  # None uses the server's random numbers
    unknown_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Column:
    """How a value for each token of a completion is stored.

    Attributes:
        dtype: Type of the array, which has the shape [tokens].
        fill: The value of a token that has none and, in packed rows, of an untrained token.
        is_list: Whether the shape is [tokens, k], with ``fill`` behind the end of a shorter list.
            ``k`` may differ between completions.
        in_rows: Whether the loss receives it, in ``TrainRows.columns`` and ``LossInputs.columns``.
    """

    dtype: type[np.generic]
    fill: float = 0
    is_list: bool = False
    in_rows: bool = False

    def filled(self, num_tokens: int, width: int = 0) -> np.ndarray:
        """Returns an array that holds only ``fill``; lists have the length ``width``."""
        shape = (num_tokens, width) if self.is_list else (num_tokens,)
        return np.full(shape, self.fill, self.dtype)

    def joined(self, parts: Sequence[tuple[int, np.ndarray | None]]) -> np.ndarray | None:
        """Joins the values of consecutive parts, each with its number of tokens."""
        arrays = [array for _, array in parts if array is not None]
        if not arrays:
            return None
        width = max(array.shape[1] for array in arrays) if self.is_list else 0
        joined = self.filled(sum(number for number, _ in parts), width)
        end = 0
        for number, array in parts:
            begin, end = end, end + number
            if array is not None:
                joined[begin:end][..., : array.shape[-1] if self.is_list else None] = array
        return joined


NO_TOKEN = -1
"""Token id that stands for none in a column of lists of token ids."""


@functools.cache
def columns_of(kind: type["Generation"]) -> dict[str, Column]:
    """Returns the columns of :class:`Generation` or :class:`Rollout`, by field name."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: mark for name, mark in marks.items() if isinstance(mark, Column)}


@dataclass(frozen=True)
class Generation:
    """A server's answer to a :class:`GenerateRequest`, with exact token ids.

    Attributes:
        token_ids: [tokens] int32, as the server sampled them, the stop token included.
        logprobs: Logprob of each token at sampling time, after temperature. With top-p or top-k,
            vLLM renormalizes over the tokens kept; SGLang and the embedded server do not. In both
            cases they differ systematically from the trainer's.
        segments: Policy versions that wrote the tokens, in order and without gaps. Tokens
            inserted by an environment belong to the segment before them.
        sampled: True for trained tokens. False, with a logprob of 0, for those of an environment,
            or of a policy that is too old (``rollout.overdue``). None if all are trained.
        environment_reward: Sum of the environment's rewards, or None if it gave none.
        num_context: Number of tokens that are not trained although a model wrote them.
        apart: Rows of an agent that have rewards of their own. Each counts as a completion.
    """

    token_ids: Annotated[np.ndarray, Column(np.int32)]
    logprobs: Annotated[np.ndarray, Column(np.float32)]
    finish_reason: FinishReason
    segments: tuple[VersionSegment, ...]
    sampled: Annotated[np.ndarray | None, Column(np.bool_, fill=True)] = None
    environment_reward: float | None = None
    num_context: int = 0
    new_rows: NewRows = ()
    apart: tuple["Generation", ...] = ()

    @property
    def num_trained(self) -> int:
        sampled = self.sampled
        return len(self.token_ids) if sampled is None else int(np.count_nonzero(sampled))

    @property
    def num_written(self) -> int:
        """The number of tokens that the model wrote, including those outside of the loss.

        Metrics, filters and the penalty of long completions take this as the completion's length.
        """
        return self.num_trained + self.num_context

    @property
    def oldest_version(self) -> int:
        """Lowest policy version that wrote a trained token; its age is the staleness."""
        sampled = self.sampled
        trained = [s for s in self.segments if sampled is None or sampled[s.start : s.end].any()]
        return min(segment.version for segment in trained or self.segments)


def separated(generations: Sequence[Generation]) -> list[Generation]:
    """Returns the generations, each followed by the rows that it holds ``apart``."""
    return [one for whole in generations for one in (replace(whole, apart=()), *whole.apart)]


def joined(before: Generation | None, after: Generation) -> Generation:
    """Joins two parts of a completion. Adjacent segments of the same version become one."""
    if before is None:
        return after
    offset = len(before.token_ids)
    segments = list(before.segments)
    for version, start, end in after.segments:
        moved = VersionSegment(version, start + offset, end + offset)
        if segments and segments[-1].version == version:
            moved = moved._replace(start=segments.pop().start)
        segments.append(moved)
    rewards = [r for r in (before.environment_reward, after.environment_reward) if r is not None]
    columns = {
        name: column.joined([(len(p.token_ids), getattr(p, name)) for p in (before, after)])
        for name, column in columns_of(Generation).items()
    }
    return replace(
        after,
        segments=tuple(segments),
        environment_reward=sum(rewards) if rewards else None,
        num_context=before.num_context + after.num_context,
        new_rows=(*before.new_rows, *((start + offset, n) for start, n in after.new_rows)),
        **columns,
    )


def unsampled(token_ids: Sequence[int], version: int, *, begins_row: bool = False) -> Generation:
    """Makes a part of a completion that was shown to the model and not written by it."""
    length = len(token_ids)
    return Generation(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.zeros(length, np.float32),
        finish_reason="length",
        segments=(VersionSegment(version, 0, length),),
        sampled=np.zeros(length, np.bool_),
        new_rows=((0, length),) if begins_row else (),
    )


def as_context(part: Generation) -> Generation:
    return replace(
        part,
        logprobs=np.zeros_like(part.logprobs),
        sampled=np.zeros(len(part.token_ids), np.bool_),
        num_context=part.num_written,
    )


@dataclass(frozen=True)
class TopTokens:
    """The most likely tokens of a model at each position of a text, in no particular order.

    Attributes:
        ids: [tokens, k] int32, different from each other at each position.
        logprobs: [tokens, k] float32, at temperature 1, of the whole vocabulary's distribution.
    """

    ids: np.ndarray
    logprobs: np.ndarray


CAUSES = {
    "policy": "rollout/unscored_by_policy",
    "service": "rollout/unscored_by_service",
    "function": "rollout/unscored_by_function",
}
"""Why a completion has no reward, with the metric: what the policy wrote, a service or a machine, or
a function that gave none or failed."""


@dataclass(frozen=True, kw_only=True)
class Rollout(Generation):
    """A completion that was scored.

    Attributes:
        prompt_ids: [prompt_len] int32, the same array in all rollouts of a group.
        completion: The decoded text, for logs only; it is never tokenized again.
        reward: Weighted sum of the reward functions. None if scoring failed: the rollout is then
            left out, and never counts as zero.
        unscored: One of `CAUSES` if scoring failed, even if ``reward.unscorable_value`` is the reward.
        reward_metrics: What the reward functions logged for the group with ``log_metric``.
        logged: What they logged for this completion with ``log_extra``, shortened for logs.
        teacher_logprobs: The teacher's logprobs of the tokens at temperature 1; None without a teacher.
        teacher_top_ids: The teacher's ``teacher.top_k`` most likely tokens at each position, all
            different; ``teacher_top_logprobs`` are their logprobs.
    """

    prompt_ids: np.ndarray
    completion: str
    reward: float | None
    unscored: str = ""
    reward_components: dict[str, float] = field(default_factory=dict)
    reward_metrics: dict[str, float] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    teacher_logprobs: Annotated[
        np.ndarray | None, Column(np.float32, fill=np.nan, in_rows=True)
    ] = None
    teacher_top_ids: Annotated[
        np.ndarray | None, Column(np.int32, fill=NO_TOKEN, is_list=True, in_rows=True)
    ] = None
    teacher_top_logprobs: Annotated[
        np.ndarray | None, Column(np.float32, is_list=True, in_rows=True)
    ] = None


@dataclass(frozen=True)
class RolloutGroup:
    """The rollouts of one prompt. Only those in ``rollouts`` are trained on.

    ``file`` is the short name of the prompt's file among several ``prompts.paths``, if known.
    """

    group_id: int
    prompt_text: str
    rollouts: tuple[Rollout, ...]  # at least one; grpo.group_size of them unless some failed
    server_url: str
    columns: dict[str, Any] = field(default_factory=dict)  # of the prompt's row, cut for logs
    is_chat: bool = False
    file: str = ""
    row: str = ""  # where the prompt's row is, such as train.jsonl:8
    left_out: tuple[Rollout, ...] = ()  # for logs: without a reward, or not accepted
