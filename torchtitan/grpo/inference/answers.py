# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What every server's answer must satisfy before it becomes a :class:`Generation`.

A wrong count or a missing version would train on tokens that were never sampled that
way, so nothing is repaired here: an answer is exact, or it is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np

from torchtitan.grpo.inference.client import ServerError, WeightGroupInfo
from torchtitan.grpo.types import FinishReason, GenerateRequest, Generation, VersionSegment

UNPUSHED_VERSION = -1
"""Version of tokens that a server wrote before its first push (it calls it ``default``).
Older than any pushed version, so the staleness bound leaves such tokens out."""

UNPUSHED_LABEL = "default"

UPDATING_LABEL = "updating"
"""Version label that a server carries while an update is loading. Nothing is sampled
then, so a token under this label means that the update broke off half-way."""


def parse_version(label: Any, source: str) -> int:
    """A policy version from a server's version label.

    Raises:
        ServerError: The label is not a version; ``source`` begins the message.
    """
    if label == UNPUSHED_LABEL:
        return UNPUSHED_VERSION
    try:
        return int(label)
    except (TypeError, ValueError):
        raise ServerError(
            f"{source}: the weight version is {label!r}, not the number of a training step: "
            "an update broke off half-way, or someone else updates this server. Push again."
        ) from None


def version_or_none(label: Any) -> int | None:
    """The version behind a label; None before the first push and amid a broken update."""
    text = str(label)
    return int(text) if text.isdecimal() else None


def version_segments(
    spans: Iterable[Sequence[Any]], num_tokens: int, source: str
) -> tuple[VersionSegment, ...]:
    """Segments from ``(label, start, end)`` spans over ``num_tokens`` tokens.

    Empty spans are left out (a version may pass without writing a token), neighbours of
    one version are joined.

    Raises:
        ServerError: The spans have gaps, overlap, or do not cover the completion.
    """
    segments: list[VersionSegment] = []
    position = 0
    spans = [tuple(span) for span in spans]
    for label, start, end in spans:
        if start == end:
            continue
        if start != position or end < start:
            break
        version = parse_version(label, source)
        if segments and segments[-1].version == version:
            segments[-1] = VersionSegment(version, segments[-1].start, end)
        else:
            segments.append(VersionSegment(version, start, end))
        position = end
    if position != num_tokens:
        raise ServerError(
            f"{source}: weight versions must cover {num_tokens} tokens without gaps, got {spans}."
        )
    return tuple(segments)


def checked_generation(
    source: str,
    request: GenerateRequest,
    *,
    token_ids: Sequence[int],
    logprobs: Sequence[tuple[float | None, int]],
    num_completion_tokens: int,
    finish_reason: Any,
    spans: Iterable[Sequence[Any]],
) -> Generation:
    """A generation from the parts of an answer, verified.

    Args:
        source: URL and route, begins every message.
        request: What was asked.
        token_ids: Sampled tokens.
        logprobs: Of each sampled token, its logprob and its id once more.
        num_completion_tokens: The count that the server states.
        finish_reason: As the server calls it.
        spans: ``(version label, start, end)`` over the tokens.

    Raises:
        ServerError: Something does not hold.
    """
    num_tokens = len(token_ids)
    if not num_tokens == len(logprobs) == num_completion_tokens:
        raise ServerError(
            f"{source}: request {request.request_id} must have as many ids as logprobs as "
            f"completion tokens, got {num_tokens}, {len(logprobs)} and {num_completion_tokens}."
        )
    if not 1 <= num_tokens <= request.max_new_tokens:
        raise ServerError(
            f"{source}: request {request.request_id} must have 1 to {request.max_new_tokens} "
            f"tokens, got {num_tokens} (finish reason {finish_reason!r})."
        )
    if finish_reason not in get_args(FinishReason):
        raise ServerError(
            f"{source}: finish reason must be one of {get_args(FinishReason)}, "
            f"got {finish_reason!r}."
        )
    ids = _as_ids(token_ids, source)
    values = np.array([np.nan if value is None else value for value, _ in logprobs], np.float32)
    if [token for _, token in logprobs] != list(token_ids):
        raise ServerError(f"{source}: the logprobs are of other tokens than the sampled ones.")
    if not np.isfinite(values).all():
        raise ServerError(f"{source}: logprobs must be finite, got {values.tolist()}.")
    return Generation(
        token_ids=ids,
        logprobs=values,
        finish_reason=cast(FinishReason, finish_reason),
        segments=version_segments(spans, num_tokens, source),
    )


def checked_prompt_logprobs(
    source: str, token_ids: Sequence[int], entries: Sequence[tuple[float | None, int]]
) -> list[float]:
    """Logprobs of all prompt tokens but the first, which follows nothing.

    Args:
        source: URL and route, begins every message.
        token_ids: The prompt that was sent.
        entries: Of each prompt token, the first included, its logprob and its id.

    Raises:
        ServerError: They are of other tokens, or not finite.
    """
    if [token for _, token in entries] != list(token_ids):
        raise ServerError(f"{source}: prompt logprobs must be of the {len(token_ids)} tokens sent.")
    values = np.array([np.nan if value is None else value for value, _ in entries[1:]])
    if not np.isfinite(values).all():
        raise ServerError(f"{source}: prompt logprobs must be finite, got {values.tolist()}.")
    return values.tolist()


def joined_group(
    groups: Mapping[str, WeightGroupInfo], group_name: str, url: str
) -> WeightGroupInfo:
    """The group of that name.

    Raises:
        ServerError: The server has not joined it.
    """
    if group_name not in groups:
        raise ServerError(f"{url} has not joined weight group {group_name}; join before pushing.")
    return groups[group_name]


def _as_ids(token_ids: Sequence[int], source: str) -> np.ndarray:
    ids = np.asarray(token_ids)
    if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ServerError(f"{source}: token ids must be int32 and not negative, got {token_ids}.")
    return ids.astype(np.int32)
