# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Parses requests to /generate and writes their answers, as JSON in SGLang's form."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenizers import Tokenizer

from torchtitan.grpo.inference.client import MAX_TOP_TOKENS
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import SamplingParams

_T = TypeVar("_T")

MAX_COMPLETIONS = 1024
"""Maximum number of completions of one request. More of them belong into several requests."""

_SAMPLING_TYPES: dict[str, tuple[type, ...]] = {
    "max_new_tokens": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "stop_token_ids": (list,),
    "ignore_eos": (bool,),
    "skip_special_tokens": (bool,),
    "sampling_seed": (int,),
    "n": (int,),
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model that parsing a request and writing its answer need.

    Attributes:
        vocab_size: Exclusive upper bound of token ids.
        max_model_len: Maximum length of prompt and completion together.
        eos_ids: End-of-sequence tokens of the model.
        tokenizer: Decodes the text of answers; ``None`` leaves the text empty.
    """

    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class GenerateBody:
    """A checked body of /generate.

    Attributes:
        prompts: Token ids of the prompt of each completion: each prompt ``n`` times in a row.
        request_ids: Id of each completion.
        sampling: Sampling parameters of each completion.
        logprob_starts: First position of each completion's prompt whose logprob is answered;
            ``None`` for none.
        num_top: Number of the most likely tokens that are answered with each prompt logprob.
        is_list: Whether the answer is a list.
    """

    prompts: list[list[int]]
    request_ids: list[str]
    sampling: list[SamplingParams]
    logprob_starts: list[int | None]
    num_top: int
    return_logprob: bool
    stream: bool
    is_list: bool


def body_field(
    body: Mapping[str, Any], name: str, kind: type[_T] | tuple[type, ...], default: Any = ...
) -> Any:
    """Returns ``body[name]``, of type ``kind``, or ``default`` if it is absent or null.

    Raises:
        ValueError: If it is of another type, or absent without a default.
    """
    value = body.get(name)
    if value is None and default is not ...:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(k.__name__ for k in kinds)
        raise ValueError(f"{name} must be of type {expected}, got {value!r:.80}.")
    return value


def parse_generate(body: Mapping[str, Any], facts: ModelFacts) -> GenerateBody:
    """Parses and checks a body of /generate.

    Raises:
        ValueError: If the request cannot be served. The message names the field.
    """
    input_ids = body.get("input_ids")
    if not isinstance(input_ids, list):
        raise ValueError("input_ids must be a list of token ids, or a list of such lists.")
    is_batch = bool(input_ids) and isinstance(input_ids[0], list)
    prompts: list[list[int]] = input_ids if is_batch else [input_ids]
    _check_number(len(prompts), 1)
    for prompt in prompts:
        _check_prompt(prompt, facts)
    sampling, num_samples = _parse_sampling(body.get("sampling_params"), len(prompts), facts)
    _check_number(len(prompts), num_samples)
    for prompt, params in zip(prompts, sampling, strict=True):
        if len(prompt) + params.max_new_tokens > facts.max_model_len:
            raise ValueError(
                f"Prompt and max_new_tokens together must be at most {facts.max_model_len} tokens "
                f"(--max-model-len), got {len(prompt)} + {params.max_new_tokens}."
            )
    return_logprob = body_field(body, "return_logprob", bool, False)
    starts = _logprob_starts(body, prompts) if return_logprob else [None] * len(prompts)
    return GenerateBody(
        prompts=[p for p in prompts for _ in range(num_samples)],
        request_ids=_request_ids(body.get("rid"), len(prompts), num_samples, is_batch),
        sampling=[_sample_params(p, i) for p in sampling for i in range(num_samples)],
        logprob_starts=[start for start in starts for _ in range(num_samples)],
        num_top=_num_top(body, facts) if return_logprob else 0,
        return_logprob=return_logprob,
        stream=body_field(body, "stream", bool, False),
        is_list=is_batch or num_samples > 1,
    )


def _check_number(num_prompts: int, num_samples: int) -> None:
    """Refuses more completions than one request may ask for, before any of them takes memory."""
    if num_prompts * num_samples > MAX_COMPLETIONS:
        raise ValueError(
            f"input_ids times sampling_params.n must be at most {MAX_COMPLETIONS} completions, got "
            f"{num_prompts} x {num_samples}. Send several requests."
        )


def _check_prompt(prompt: Any, facts: ModelFacts) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"Each prompt in input_ids must be a non-empty list, got {prompt!r:.80}.")
    if len(prompt) >= facts.max_model_len:
        raise ValueError(
            f"A prompt must be shorter than {facts.max_model_len} tokens (--max-model-len), "
            f"got {len(prompt)}."
        )
    for token in prompt:
        if type(token) is not int or not 0 <= token < facts.vocab_size:
            raise ValueError(
                f"Token ids in input_ids must be integers in [0, {facts.vocab_size}), got {token!r}."
            )


def _logprob_starts(body: Mapping[str, Any], prompts: list[list[int]]) -> list[int | None]:
    """Returns the first position of each prompt whose logprob is answered."""
    given = body_field(body, "logprob_start_len", (int, list), -1)
    longest = max(len(prompt) for prompt in prompts)
    if isinstance(given, int):
        # One number for prompts of different lengths may lie behind the shorter ones.
        starts, most = [given] * len(prompts), [longest] * len(prompts)
    else:
        starts, most = given, [len(prompt) for prompt in prompts]
    if len(starts) != len(prompts):
        raise ValueError(
            f"logprob_start_len must be one number, or one for each of the {len(prompts)} prompts, got "
            f"{len(starts)}."
        )
    for start, length in zip(starts, most, strict=True):
        if type(start) is not int or not -1 <= start <= length:
            raise ValueError(f"logprob_start_len must be in [-1, {length}], got {start!r:.80}.")
    return [
        None if start in (-1, length) else start for start, length in zip(starts, most, strict=True)
    ]


def _num_top(body: Mapping[str, Any], facts: ModelFacts) -> int:
    number = body_field(body, "top_logprobs_num", int, 0)
    # Without a bound, one request could ask for the whole vocabulary at each token of a long text.
    most = min(MAX_TOP_TOKENS, facts.vocab_size)
    if not 0 <= number <= most:
        raise ValueError(f"top_logprobs_num must be in [0, {most}], got {number}.")
    return number


def _parse_sampling(
    given: Any, num_prompts: int, facts: ModelFacts
) -> tuple[list[SamplingParams], int]:
    """Returns the :class:`SamplingParams` of each prompt, and ``n``."""
    entries = given if isinstance(given, list) else [given or {}] * num_prompts
    if len(entries) != num_prompts:
        raise ValueError(
            f"sampling_params must be one object, or one for each of the {num_prompts} prompts, got "
            f"{len(entries)}."
        )
    counts = set()
    parsed = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError(f"sampling_params must be an object, got {entry!r:.80}.")
        # A null field has no effect in SGLang, so it may be one that this server does not support.
        unknown = [k for k, v in entry.items() if k not in _SAMPLING_TYPES and v is not None]
        if unknown:
            raise ValueError(
                f"sampling_params.{unknown[0]} is not supported by the embedded server. "
                f"Supported: {', '.join(_SAMPLING_TYPES)}."
            )
        fields = {
            name: body_field(entry, name, kinds)
            for name, kinds in _SAMPLING_TYPES.items()
            if entry.get(name) is not None
        }
        counts.add(fields.pop("n", 1))
        stop_ids = fields.pop("stop_token_ids", [])
        if not all(type(token) is int for token in stop_ids):
            raise ValueError(
                f"sampling_params.stop_token_ids must be integers, got {stop_ids!r:.80}."
            )
        params = SamplingParams(**fields, stop_token_ids=frozenset(stop_ids))
        params.validate()
        parsed.append(params)
    if len(counts) != 1 or min(counts) < 1:
        raise ValueError(
            f"sampling_params.n must be one number of at least 1, got {sorted(counts)}."
        )
    return parsed, counts.pop()


def _sample_params(params: SamplingParams, index: int) -> SamplingParams:
    """Returns the parameters of a prompt's ``index``-th completion, with a seed of its own."""
    if params.sampling_seed is None or index == 0:
        return params
    return SamplingParams(**{**params.__dict__, "sampling_seed": params.sampling_seed + index})


def _request_ids(rid: Any, num_prompts: int, num_samples: int, is_batch: bool) -> list[str]:
    if rid is None:
        bases = [uuid.uuid4().hex for _ in range(num_prompts)]
    elif isinstance(rid, str):
        bases = [f"{rid}_{i}" for i in range(num_prompts)] if is_batch else [rid]
    elif isinstance(rid, list) and len(rid) == num_prompts and all(type(r) is str for r in rid):
        bases = list(rid)
    else:
        raise ValueError(
            f"rid must be a string, or a list of one string for each prompt, got {rid!r:.80}."
        )
    if num_samples == 1:
        return bases
    return [f"{base}_{i}" for base in bases for i in range(num_samples)]


def stop_ids_of(params: SamplingParams, facts: ModelFacts) -> frozenset[int]:
    """Returns all tokens that end a completion."""
    return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | facts.eos_ids


def format_answer(
    request: Request,
    num_tokens: int,
    finished: bool,
    facts: ModelFacts,
    *,
    return_logprob: bool,
) -> dict[str, Any]:
    """Returns the answer of /generate for a request after its first ``num_tokens`` tokens."""
    output_ids = request.output_ids[:num_tokens]
    finish_reason = request.finish_reason if finished else None
    segments = [(version, start) for version, start in request.segments if start <= num_tokens]
    versions = [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(
            segments, [start for _, start in segments[1:]] + [num_tokens], strict=True
        )
        if end > start
    ]
    meta: dict[str, Any] = {
        "id": request.request_id,
        "finish_reason": finish_reason,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": num_tokens,
        "cached_tokens": request.shared_prompt_tokens,
        "weight_version": segments[-1][0],
        "weight_versions": versions,
    }
    if return_logprob:
        logprobs = request.logprobs[:num_tokens]
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(logprobs, output_ids, strict=True)
        ]
    if request.logprob_start is not None:
        meta |= _rating_fields(request, request.logprob_start)
    return {
        "text": _text(request, output_ids, finish_reason, facts),
        "output_ids": output_ids,
        "meta_info": meta,
    }


def _rating_fields(request: Request, start: int) -> dict[str, Any]:
    """Returns the logprobs of the prompt from ``start`` on, and the most likely tokens there."""
    assert request.rating is not None, "a prompt is rated before it is answered"
    # The first token has no context, and so no logprob.
    prompt = zip([None, *request.rating.logprobs], request.prompt_ids, strict=True)
    fields: dict[str, Any] = {
        "input_token_logprobs": [[logprob, token, None] for logprob, token in list(prompt)[start:]]
    }
    if request.num_top:
        top = request.rating.top
        assert top is not None, "the most likely tokens were asked for"
        begin, k = max(start - 1, 0), request.num_top
        values, ids = top.logprobs[begin:, :k].tolist(), top.ids[begin:, :k].tolist()
        places = [
            [[value, token, None] for value, token in zip(*place, strict=True)]
            for place in zip(values, ids, strict=True)
        ]
        fields["input_top_logprobs"] = places if start else [None, *places]
    return fields


def _text(
    request: Request, output_ids: list[int], finish_reason: dict | None, facts: ModelFacts
) -> str:
    if facts.tokenizer is None:
        return ""
    stopped = finish_reason is not None and finish_reason["type"] == "stop"
    return facts.tokenizer.decode(
        output_ids[:-1] if stopped else output_ids,
        skip_special_tokens=request.sampling.skip_special_tokens,
    )
