# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What every server's answer must satisfy before it becomes a :class:`Generation`.

A wrong count or a missing version would train on tokens that were never sampled that
way, so nothing is repaired here: an answer is exact, or it is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.http import excerpt
from torchtitan.grpo.types import FinishReason, GenerateRequest, Generation, VersionSegment
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

UNPUSHED_VERSION = -1
"""Version of tokens that a server wrote before its first push (it calls it ``default``).
Older than any pushed version, so the staleness bound leaves such tokens out."""

UNPUSHED_LABEL = "default"

UPDATING_LABEL = "updating"
"""Version label that a server carries while an update is loading. Nothing is sampled
then, so a token under this label means that the update broke off half-way."""

MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What taking an answer apart may raise where it is not of the expected shape."""

_VERSION_DIGITS = 18
# Of a logprob that should be 0, in whatever precision a server computes it.
_ROUNDING = 1e-3
_LOWEST_LOGPROB = float(np.finfo(np.float32).min)
_ANSWER_BYTES = 2**20
_ANSWER_BYTES_PER_TOKEN = 1024


def parse_version(label: Any, source: str) -> int:
    """A policy version from a server's version label.

    Raises:
        ServerError: The label is not a version; ``source`` begins the message.
    """
    if label == UNPUSHED_LABEL:
        return UNPUSHED_VERSION
    # int() would take 3.7, True and " 3" as well.
    version = version_or_none(label) if type(label) in (str, int) else None
    if version is None:
        raise ServerError(
            f"{source}: the weight version is {label!r:.80}, not the number of a training step: "
            "an update broke off half-way, or someone else updates this server. Push again."
        )
    return version


def version_or_none(label: Any) -> int | None:
    """The version behind a label; None before the first push and amid a broken update."""
    text = str(label)
    return int(text) if text.isdecimal() and len(text) <= _VERSION_DIGITS else None


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
    position, has_gap = 0, False
    spans = [tuple(span) for span in spans]
    for label, start, end in spans:
        if not (type(start) is type(end) is int and start <= end):
            has_gap = True
            break
        if start == end:
            continue
        if start != position:
            has_gap = True
            break
        version = parse_version(label, source)
        if segments and segments[-1].version == version:
            segments[-1] = VersionSegment(version, segments[-1].start, end)
        else:
            segments.append(VersionSegment(version, start, end))
        position = end
    if has_gap or position != num_tokens:
        raise ServerError(
            f"{source}: weight versions must cover {num_tokens} tokens without gaps, "
            f"got {spans!s:.300}."
        )
    return tuple(segments)


def checked_generation(
    source: str,
    request: GenerateRequest,
    *,
    sent_id: str,
    answered_id: Any,
    num_prompt_tokens: Any,
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
        sent_id: The request's id as the server knows it.
        answered_id: The id that the answer bears.
        num_prompt_tokens: Of the prompt that the server says it continued.
        token_ids: Sampled tokens.
        logprobs: Of each sampled token, its logprob and its id once more.
        num_completion_tokens: The count that the server states.
        finish_reason: As the server calls it.
        spans: ``(version label, start, end)`` over the tokens.

    Raises:
        ServerError: Something does not hold.
    """
    _require_own_answer(source, request, sent_id, answered_id, num_prompt_tokens)
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
    if [token for _, token in logprobs] != list(token_ids):
        raise ServerError(f"{source}: the logprobs are of other tokens than the sampled ones.")
    values = [value for value, _ in logprobs]
    _require_logprobs(values, f"{source}: logprobs")
    return Generation(
        token_ids=ids,
        logprobs=np.array(values, np.float32),
        finish_reason=cast(FinishReason, finish_reason),
        segments=version_segments(spans, num_tokens, source),
    )


def max_answer_bytes(request: GenerateRequest) -> int:
    """More than any answer to ``request`` has: what is longer need not be read to its end."""
    num_tokens = len(request.prompt_ids) + request.max_new_tokens
    return _ANSWER_BYTES + _ANSWER_BYTES_PER_TOKEN * num_tokens


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
    values: list[Any] = [value for value, _ in entries[1:]]
    _require_logprobs(values, f"{source}: prompt logprobs")
    return [float(value) for value in values]


def as_object(body: Any, source: str) -> dict[str, Any]:
    """The answer, which must be a JSON object.

    Raises:
        ServerError: It is not; ``source`` begins the message.
    """
    if not isinstance(body, dict):
        raise ServerError(f"{source} must answer a JSON object, got {excerpt(body)}")
    return body


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


def _require_own_answer(
    source: str, request: GenerateRequest, sent_id: str, answered_id: Any, num_prompt_tokens: Any
) -> None:
    if answered_id != sent_id:
        raise ServerError(
            f"{source}: request {sent_id} must be answered under its own id, the answer bears "
            f"{answered_id!r:.80}. Servers, and proxies before them, must not mix up answers, "
            "nor give requests ids of their own (X-Request-Id)."
        )
    if num_prompt_tokens != len(request.prompt_ids):
        raise ServerError(
            f"{source}: request {sent_id} was sent with {len(request.prompt_ids)} prompt tokens, "
            f"the answer continues {num_prompt_tokens!r:.80}. The server must not cut prompts."
        )


def _as_ids(token_ids: Sequence[int], source: str) -> np.ndarray:
    most = np.iinfo(np.int32).max
    if not all(type(token) is int and 0 <= token <= most for token in token_ids):
        raise ServerError(
            f"{source}: token ids must be int32 and not negative, got {token_ids!s:.300}."
        )
    return np.array(token_ids, np.int32)


def _require_logprobs(values: Sequence[Any], what: str) -> None:
    # Compared before they are converted: no number is too large for this, and NaN fails it.
    if not all(type(v) in (float, int) and _LOWEST_LOGPROB <= v <= _ROUNDING for v in values):
        raise ServerError(f"{what} must be finite and not above 0, got {values!s:.300}.")
