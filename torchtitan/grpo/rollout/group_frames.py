# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Packs groups of rollouts as msgpack headers followed by raw arrays.

The packed form travels between processes and is stored in the files of saved rollouts.
Unpacked arrays are views of the received frames, and therefore read-only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np

from torchtitan.grpo.types import FinishReason, Rollout, RolloutGroup, TopTokens, VersionSegment


class RolloutHeader(msgspec.Struct):
    """A rollout without its arrays.

    ``num_top`` is the number of the teacher's most likely tokens for each completion token.
    """

    num_tokens: int
    segments: list[tuple[int, int, int]]
    finish_reason: FinishReason
    completion: str
    reward: float | None
    reward_components: dict[str, float]
    has_mask: bool = False
    num_context: int = 0
    new_rows: list[tuple[int, int]] = []
    is_rated: bool = False
    num_top: int = 0


class SampleIds(msgspec.Struct):
    """Token IDs (int32) of the prompt and of the first completion of a group."""

    prompt: bytes
    completion: bytes


class GroupHeader(msgspec.Struct):
    """A group without its arrays. Its rollouts share the token IDs of the prompt.

    ``sample`` is set only for a group whose first rollout is logged although its arrays are not
    sent; see :func:`with_samples`.
    """

    group_id: int
    prompt_text: str
    prompt_len: int
    server_url: str
    rollouts: list[RolloutHeader]
    columns: dict[str, Any] = {}
    is_chat: bool = False
    sample: SampleIds | None = None
    file: str = ""


def pack_groups(groups: Sequence[RolloutGroup]) -> tuple[list[GroupHeader], list[bytes]]:
    """Splits groups into headers and seven frames.

    Returns:
        The headers, and seven frames: the token IDs of all prompts (int32), the token IDs of all
        completions (int32), the logprobs of all completions (float32), the masks of sampled
        tokens (bool) of those completions that have one, the teacher's logprobs (float32) of
        those that were rated, and the token IDs (int32) and logprobs (float32) of the teacher's
        most likely tokens. Each frame is concatenated in order.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tops = [rollout.teacher_top for rollout in rollouts if rollout.teacher_top is not None]
    frames = [
        _concatenate([group.rollouts[0].prompt_ids for group in groups], np.int32),
        _concatenate([rollout.token_ids for rollout in rollouts], np.int32),
        _concatenate([rollout.logprobs for rollout in rollouts], np.float32),
        _concatenate([r.sampled for r in rollouts if r.sampled is not None], np.bool_),
        _concatenate(
            [r.teacher_logprobs for r in rollouts if r.teacher_logprobs is not None], np.float32
        ),
        _concatenate([top.ids.reshape(-1) for top in tops], np.int32),
        _concatenate([top.logprobs.reshape(-1) for top in tops], np.float32),
    ]
    return [_group_header(group) for group in groups], frames


def without_arrays(frames: Sequence[bytes]) -> list[bytes]:
    """Returns the frames of a batch with the token IDs and logprobs removed."""
    return [b"", b"", b"", frames[3], b"", b"", b""]


def with_samples(
    headers: Sequence[GroupHeader], groups: Sequence[RolloutGroup], num_samples: int
) -> list[GroupHeader]:
    """Returns the headers, the first ones with the token IDs of the group's first rollout."""
    first = [
        msgspec.structs.replace(
            header,
            sample=SampleIds(
                _concatenate([group.rollouts[0].prompt_ids], np.int32),
                _concatenate([group.rollouts[0].token_ids], np.int32),
            ),
        )
        for header, group in zip(headers[:num_samples], groups, strict=False)
    ]
    return [*first, *headers[num_samples:]]


def unpack_groups(
    headers: Sequence[GroupHeader], frames: Sequence[bytes], *, has_arrays: bool = True
) -> list[RolloutGroup]:
    """Reverses :func:`pack_groups`. The rollouts of a group share one prompt array.

    Args:
        headers: The headers of the groups.
        frames: The arrays of the groups.
        has_arrays: Pass ``False`` after :func:`without_arrays`. All lengths are then correct, and
            every token ID and logprob is 0, except for the IDs of samples.

    Raises:
        ValueError: If the arrays are not those of the headers.
    """
    cursor = _Cursor if has_arrays else _Zeros
    prompts, arrays = cursor.of(frames[0], np.int32), _Arrays.of(frames, cursor)
    groups = [
        RolloutGroup(
            group_id=header.group_id,
            prompt_text=header.prompt_text,
            rollouts=tuple(_rollouts(header, prompts.take(header.prompt_len), arrays)),
            server_url=header.server_url,
            columns=header.columns,
            is_chat=header.is_chat,
            file=header.file,
        )
        for header in headers
    ]
    if has_arrays and not all(each.is_read for each in (prompts, *vars(arrays).values())):
        raise ValueError("its arrays are longer than its header says")
    return groups


@dataclass
class _Cursor:
    array: np.ndarray
    position: int = 0

    @classmethod
    def of(cls, frame: bytes, dtype: type[np.generic]) -> Self:
        return cls(np.frombuffer(frame, dtype))

    @property
    def is_read(self) -> bool:
        return self.position == len(self.array)

    def take(self, length: int) -> np.ndarray:
        start, self.position = self.position, self.position + length
        if not start <= self.position <= len(self.array):
            raise ValueError("its arrays are shorter than its header says")
        return self.array[start : self.position]


class _Zeros(_Cursor):
    """Returns arrays of zeros that take no memory, in place of the missing arrays."""

    def take(self, length: int) -> np.ndarray:
        return np.broadcast_to(np.zeros((), self.array.dtype), length)


@dataclass
class _Arrays:
    """The arrays of all rollouts, each of which is read from its beginning to its end."""

    tokens: _Cursor
    logprobs: _Cursor
    masks: _Cursor
    ratings: _Cursor
    top_ids: _Cursor
    top_logprobs: _Cursor

    @classmethod
    def of(cls, frames: Sequence[bytes], cursor: type[_Cursor]) -> Self:
        # Files of saved rollouts of earlier releases end before the last frames.
        frames = [*frames, b"", b"", b""]
        return cls(
            tokens=cursor.of(frames[1], np.int32),
            logprobs=cursor.of(frames[2], np.float32),
            masks=_Cursor.of(frames[3], np.bool_),
            ratings=cursor.of(frames[4], np.float32),
            top_ids=cursor.of(frames[5], np.int32),
            top_logprobs=cursor.of(frames[6], np.float32),
        )

    def take_top(self, num_tokens: int, num_top: int) -> TopTokens | None:
        if num_top == 0:
            return None
        shape = (num_tokens, num_top)
        ids, logprobs = (c.take(num_tokens * num_top) for c in (self.top_ids, self.top_logprobs))
        return TopTokens(ids.reshape(shape), logprobs.reshape(shape))


def _group_header(group: RolloutGroup) -> GroupHeader:
    prompt = group.rollouts[0].prompt_ids
    assert all(np.array_equal(rollout.prompt_ids, prompt) for rollout in group.rollouts), (
        f"the rollouts of group {group.group_id} have different prompts"
    )
    return GroupHeader(
        group_id=group.group_id,
        prompt_text=group.prompt_text,
        prompt_len=len(prompt),
        server_url=group.server_url,
        columns=group.columns,
        is_chat=group.is_chat,
        file=group.file,
        rollouts=[
            RolloutHeader(
                num_tokens=len(rollout.token_ids),
                segments=[(s.version, s.start, s.end) for s in rollout.segments],
                finish_reason=rollout.finish_reason,
                completion=rollout.completion,
                reward=rollout.reward,
                reward_components=rollout.reward_components,
                has_mask=rollout.sampled is not None,
                num_context=rollout.num_context,
                new_rows=list(rollout.new_rows),
                is_rated=rollout.teacher_logprobs is not None,
                num_top=0 if rollout.teacher_top is None else rollout.teacher_top.ids.shape[1],
            )
            for rollout in group.rollouts
        ],
    )


def _rollouts(header: GroupHeader, prompt_ids: np.ndarray, arrays: _Arrays) -> Iterator[Rollout]:
    sample = header.sample
    if sample is not None:
        prompt_ids = np.frombuffer(sample.prompt, np.int32)
    for index, rollout in enumerate(header.rollouts):
        completion_ids = arrays.tokens.take(rollout.num_tokens)
        if sample is not None and index == 0:
            completion_ids = np.frombuffer(sample.completion, np.int32)
        yield Rollout(
            prompt_ids=prompt_ids,
            token_ids=completion_ids,
            logprobs=arrays.logprobs.take(rollout.num_tokens),
            segments=tuple(VersionSegment(*segment) for segment in rollout.segments),
            finish_reason=rollout.finish_reason,
            completion=rollout.completion,
            reward=rollout.reward,
            reward_components=rollout.reward_components,
            sampled=arrays.masks.take(rollout.num_tokens) if rollout.has_mask else None,
            num_context=rollout.num_context,
            new_rows=tuple(rollout.new_rows),
            teacher_logprobs=arrays.ratings.take(rollout.num_tokens) if rollout.is_rated else None,
            teacher_top=arrays.take_top(rollout.num_tokens, rollout.num_top),
        )


def _concatenate(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> bytes:
    if not arrays:
        return b""
    return np.concatenate([np.asarray(array, dtype=dtype) for array in arrays]).tobytes()
