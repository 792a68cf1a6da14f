# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that every server's answer must pass.

With a wrong count or a missing version, the policy would be trained on tokens that were sampled in another
way. An answer is therefore never repaired: it is exact, or it is refused.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, get_args

import numpy as np

from torchtitan.grpo.inference.client import LogprobsError, PromptRating, ServerError, ServerLoad
from torchtitan.grpo.inference.http import excerpt
from torchtitan.grpo.types import (
    FinishReason,
    GenerateRequest,
    Generation,
    TopTokens,
    VersionSegment,
)

UNPUSHED_VERSION = -1
"""Version of tokens sampled before the first push, which the staleness bound thus excludes."""

UNPUSHED_LABEL = "default"

UPDATING_LABEL = "updating"
"""Version label during a load, and from a sleep to the next push, when no token is sampled: one that
has it shows that something failed.
"""

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

LOWEST_SAMPLED_LOGPROB = float(np.log(np.finfo(np.float32).tiny))
"""Bound that the logprob of a sampled token is above, about -87.3 nats, after any temperature.

Samplers draw from a softmax in float32. GPUs flush a probability below the smallest normal number
to 0. Elsewhere random numbers of 24 to 64 bits cannot choose it: their noise spans 50 nats at most.
"""

LOWEST_LOGPROB = -9999.0
"""Bound that the logprob is above of a token that was not sampled, such as in a teacher's rating.
vLLM writes this number in place of minus infinity.
"""

HIGHEST_LOGPROB = 1e-3
"""Largest logprob that rounding can make of 0, in any precision that a server computes in."""

_VERSION_DIGITS = 18
_ANSWER_BYTES = 2**20
_ANSWER_BYTES_PER_TOKEN = 1024
_ANSWER_BYTES_PER_TOP_TOKEN = 128
_MAX_LOAD = 1e9  # no server has this many requests


@contextmanager
def reading(source: str, body: Any, wanted: str) -> Iterator[None]:
    """Context for reading ``body``: turns parsing errors into a ServerError that says what is ``wanted``."""
    try:
        yield
    except _MALFORMED as error:
        raise ServerError(
            f"{source}: the answer must hold {wanted} ({type(error).__name__}: {error}), got "
            f"{excerpt(body)}"
        ) from error


def parse_version(label: Any, source: str) -> int:
    if label == UNPUSHED_LABEL:
        return UNPUSHED_VERSION
    # int() would accept 3.7, True and " 3" as well.
    version = version_or_none(label) if type(label) in (str, int) else None
    if version is None:
        raise ServerError(
            f"{source}: the weight version must be the number of a training step, got "
            f"{label!r:.80}. An update broke off half-way, or another program updates this "
            "server. Push the weights again."
        )
    return version


def version_or_none(label: Any) -> int | None:
    """Reads a version label; returns ``None`` for the labels before the first push and during an update."""
    text = str(label)
    return int(text) if text.isdecimal() and len(text) <= _VERSION_DIGITS else None


def version_segments(
    spans: Iterable[Sequence[Any]], num_tokens: int, source: str
) -> tuple[VersionSegment, ...]:
    """Turns ``(label, start, end)`` spans, which must cover all tokens, into one segment per version."""
    spans = [tuple(span) for span in spans]
    are_ranges = all(type(start) is type(end) is int and start <= end for _, start, end in spans)
    filled = [span for span in spans if span[1] < span[2]] if are_ranges else []
    if [0, *(end for _, _, end in filled)] != [*(start for _, start, _ in filled), num_tokens]:
        raise ServerError(
            f"{source}: weight versions must cover {num_tokens} tokens without gaps, "
            f"got {spans!s:.300}."
        )
    segments: list[VersionSegment] = []
    for label, start, end in filled:
        version = parse_version(label, source)
        if segments and segments[-1].version == version:
            start = segments.pop().start
        segments.append(VersionSegment(version, start, end))
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
    """Returns the completion if all parts of the answer agree, and raises ServerError otherwise.

    ``logprobs`` holds logprob and id of each sampled token, and ``spans`` holds ``(version label,
    start, end)`` over the tokens. Messages begin with ``source`` (URL and route).
    """
    _require_own_answer(source, request, sent_id, answered_id, num_prompt_tokens)
    num_tokens = len(token_ids)
    if not num_tokens == len(logprobs) == num_completion_tokens:
        raise ServerError(
            f"{source}: the answer to request {request.request_id} must hold a token id and a "
            f"logprob for each completion token that it counts, got {num_tokens} ids, "
            f"{len(logprobs)} logprobs and a count of {num_completion_tokens}."
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
        raise LogprobsError(f"{source}: the logprobs do not belong to the sampled tokens.")
    values = [value for value, _ in logprobs]
    _require_logprobs(values, f"{source}: logprobs of sampled tokens", LOWEST_SAMPLED_LOGPROB)
    return Generation(
        token_ids=ids,
        logprobs=np.array(values, np.float32),
        finish_reason=cast(FinishReason, finish_reason),
        segments=version_segments(spans, num_tokens, source),
    )


def logit_bias(request: GenerateRequest) -> dict[str, dict[str, float]]:
    """Returns the vLLM and SGLang parameter that excludes unknown ids; empty above vLLM's limit of 1024 ids."""
    ids = request.unknown_ids
    return {"logit_bias": dict.fromkeys(map(str, ids), -100.0)} if 0 < len(ids) <= 1024 else {}


def max_answer_bytes(request: GenerateRequest) -> int:
    num_tokens = len(request.prompt_ids) + request.max_new_tokens
    return _ANSWER_BYTES + _ANSWER_BYTES_PER_TOKEN * num_tokens


def max_rating_bytes(sequences: Sequence[Sequence[int]], num_top: int) -> int:
    per_token = _ANSWER_BYTES_PER_TOKEN + _ANSWER_BYTES_PER_TOP_TOKEN * num_top
    return _ANSWER_BYTES + per_token * sum(map(len, sequences))


def checked_rating(
    source: str,
    token_ids: Sequence[int],
    entries: Sequence[tuple[float | None, int]],
    rows: Sequence[Sequence[tuple[Any, Any]]],
    num_top: int,
) -> PromptRating:
    """Returns the rating of all tokens but the first; raises ServerError if the answer does not fit.

    ``entries`` holds logprob and id of each token. ``rows`` holds, for each rated token, logprob and id
    of the ``num_top`` most likely tokens at its position.
    """
    if [token for _, token in entries] != list(token_ids):
        raise ServerError(
            f"{source}: the prompt logprobs must belong to the {len(token_ids)} tokens that were "
            "sent, but the answer names other tokens."
        )
    values: list[Any] = [value for value, _ in entries[1:]]
    _require_logprobs(values, f"{source}: prompt logprobs", LOWEST_LOGPROB)
    top = _checked_top_tokens(source, rows, num_top) if num_top else None
    return PromptRating([float(value) for value in values], top)


def _checked_top_tokens(
    source: str, rows: Sequence[Sequence[tuple[Any, Any]]], num_top: int
) -> TopTokens:
    wrong = {len(row) for row in rows} - {num_top}
    if wrong:
        raise ServerError(
            f"{source}: each token must come with the {num_top} most likely ones in its place, as "
            f"was asked, got {sorted(wrong)[0]}."
        )
    logprobs = [value for row in rows for value, _ in row]
    what = f"{source}: logprobs of the most likely tokens"
    _require_logprobs(logprobs, what, LOWEST_LOGPROB)
    ids = _as_ids([token for row in rows for _, token in row], source).reshape(-1, num_top)
    if (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
        raise ServerError(
            f"{source}: the {num_top} most likely tokens of a place must be different ones, but the "
            "answer names one of them twice."
        )
    return TopTokens(ids, np.array(logprobs, np.float32).reshape(-1, num_top))


def as_object(body: Any, source: str) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ServerError(f"{source} must answer a JSON object, got {excerpt(body)}")
    return body


def _require_own_answer(
    source: str, request: GenerateRequest, sent_id: str, answered_id: Any, num_prompt_tokens: Any
) -> None:
    if answered_id != sent_id:
        raise ServerError(
            f"{source}: request {sent_id} must be answered under its own id, got "
            f"{answered_id!r:.80}. Neither the server nor a proxy in front of it may exchange "
            "answers or replace request ids (X-Request-Id)."
        )
    if num_prompt_tokens != len(request.prompt_ids):
        raise ServerError(
            f"{source}: request {sent_id} was sent with {len(request.prompt_ids)} prompt tokens, "
            f"but the answer states {num_prompt_tokens!r:.80}. The server must not cut prompts."
        )


def _as_ids(token_ids: Sequence[int], source: str) -> np.ndarray:
    most = np.iinfo(np.int32).max
    if not all(type(token) is int and 0 <= token <= most for token in token_ids):
        raise ServerError(
            f"{source}: token ids must be integers in [0, 2**31) (int32), got {token_ids!s:.300}."
        )
    return np.array(token_ids, np.int32)


def _require_logprobs(values: Sequence[Any], what: str, lowest: float) -> None:
    # Integers of any size are numbers in JSON; the largest float stands for one that fits none.
    numbers = [
        min(max(v, -sys.float_info.max), sys.float_info.max) if type(v) in (float, int) else np.nan
        for v in values
    ]
    bad = first_bad_logprob(np.array(numbers, np.float64), lowest)
    if bad is not None:
        raise LogprobsError(
            f"{what} {logprob_rule(lowest)}, got {values[bad]!r:.80} at token {bad}."
        )


def first_bad_logprob(values: np.ndarray, lowest: float) -> int | None:
    """Returns the index of the first of ``values`` [tokens] that cannot be a logprob, or None."""
    bad = np.flatnonzero(~((values > lowest) & (values <= HIGHEST_LOGPROB)))  # NaN is neither
    return int(bad[0]) if bad.size else None


def logprob_rule(lowest: float) -> str:
    return f"must be finite, above {lowest:.5g} and not above 0"


def checked_load(
    source: str,
    running: Sequence[float],
    waiting: Sequence[float],
    kv_use: Sequence[float],
    prefill: Sequence[float] = (),
    decode: Sequence[float] = (),
) -> ServerLoad:
    """Returns the load of all engines: sums, and the use of the fullest KV cache.

    ``prefill`` and ``decode`` are seconds, empty if the server does not report them.
    """
    values = [*running, *waiting, *kv_use]
    if not values or not all(0 <= value < _MAX_LOAD for value in values):  # nor NaN
        raise ServerError(
            f"{source} must answer numbers in [0, {_MAX_LOAD:g}), got running requests "
            f"{running}, waiting requests {waiting} and use of the KV cache {kv_use}."
        )
    seconds = [sum(values) for values in (prefill, decode)]
    if not all(0 <= each < math.inf for each in seconds):
        seconds = [0.0, 0.0]
    return ServerLoad(int(sum(running)), int(sum(waiting)), max(kv_use), *seconds)


def to_number(value: Any) -> float:
    """Converts a JSON value or text to a float, or to NaN if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def first_architecture(config: dict[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else None


def smallest(*values: Any) -> int | None:
    numbers = [value for value in values if type(value) is int and value > 0]
    return min(numbers, default=None)
