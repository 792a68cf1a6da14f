# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The JSON of requests and answers, in SGLang's form, as far as this project's clients use it."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta
from transformers import PreTrainedTokenizerBase

from torchtitan.grpo.inference.client import MAX_TOP_TOKENS
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import SamplingParams
from torchtitan.grpo.system.http_site import read_body

_T = TypeVar("_T")

MAX_PROMPTS = 1024
# Far above any prompt: a million token ids take 6 MB.
_MAX_BODY_BYTES = 16 * 2**20
_MAX_WORLD_SIZE = 4096


@dataclass(frozen=True)
class ModelFacts:
    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]


class GenerateBody(msgspec.Struct):
    """The body of ``/generate``: one prompt, or a list of prompts that is answered by a list.

    ``rid`` is the request's id; for a list, it is the prefix of its completions' ids. ``logprob_start_len``
    holds, for each prompt, the first position whose logprob is returned, or is -1 for no prompt logprobs.
    """

    input_ids: list[int | list[int]]
    rid: str | None = None
    sampling_params: SamplingParams = SamplingParams()
    logprob_start_len: Literal[-1] | list[int] = -1
    top_logprobs_num: Annotated[int, Meta(ge=0, le=MAX_TOP_TOKENS)] = 0
    stream: bool = False

    @property
    def is_list(self) -> bool:
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)

    def requests(self, facts: ModelFacts) -> list[Request]:
        """Returns a request for each prompt, or raises a ValueError that names the wrong field."""
        if self.stream:
            raise ValueError("stream must be false: the embedded server answers whole completions.")
        prompts: Any = self.input_ids if self.is_list else [self.input_ids]
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(
                f"input_ids must be at most {MAX_PROMPTS} prompts, got {len(prompts)}. Send several "
                "requests."
            )
        sampling = self.sampling_params
        for prompt in prompts:
            _check_prompt(prompt, sampling.max_new_tokens, facts)
        if self.top_logprobs_num > facts.vocab_size:
            raise ValueError(
                f"top_logprobs_num must be at most {facts.vocab_size}, the size of the vocabulary, got "
                f"{self.top_logprobs_num}."
            )
        rid = uuid.uuid4().hex if self.rid is None else self.rid
        stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else facts.eos_ids)
        return [
            Request(
                request_id=f"{rid}_{i}" if self.is_list else rid,
                prompt_ids=prompt,
                sampling=sampling,
                stop_ids=stop_ids,
                logprob_start=start,
                num_top=0 if start is None else self.top_logprobs_num,
            )
            for i, (prompt, start) in enumerate(zip(prompts, self._starts(prompts), strict=True))
        ]

    def _starts(self, prompts: Sequence[list[int]]) -> Sequence[int | None]:
        starts = self.logprob_start_len
        if starts == -1:
            return [None] * len(prompts)
        if len(starts) != len(prompts) or not all(
            0 <= start < len(prompt) for start, prompt in zip(starts, prompts, strict=True)
        ):
            raise ValueError(
                "logprob_start_len must be -1, or a position in each prompt, got "
                f"{starts!r:.80} for prompts of {[len(prompt) for prompt in prompts]!r:.80} tokens."
            )
        return starts


def _check_prompt(prompt: Any, max_new_tokens: int, facts: ModelFacts) -> None:
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
                f"Token ids in input_ids must be integers in [0, {facts.vocab_size}), got "
                f"{token!r:.80}."
            )
    if len(prompt) + max_new_tokens > facts.max_model_len:
        raise ValueError(
            f"Prompt and max_new_tokens together must be at most {facts.max_model_len} tokens "
            f"(--max-model-len), got {len(prompt)} + {max_new_tokens}."
        )


class ChatBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``/v1/chat/completions``, with only the fields that an LLM judge needs."""

    messages: list[dict[str, Any]]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    chat_template_kwargs: dict[str, Any] = {}
    stream: Literal[False] = False

    def request(self, tokenizer: PreTrainedTokenizerBase, facts: ModelFacts) -> Request:
        try:
            text: Any = tokenizer.apply_chat_template(
                self.messages,
                tokenize=False,
                add_generation_prompt=True,
                **self.chat_template_kwargs,
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(f"The chat template cannot render messages: {error}") from error
        ids: list[Any] = tokenizer.encode(text, add_special_tokens=False)
        most = self.max_completion_tokens or self.max_tokens or facts.max_model_len - len(ids)
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "max_new_tokens": most}
        params = msgspec.convert(sampling, SamplingParams)
        return GenerateBody(ids, sampling_params=params).requests(facts)[0]


class AbortBody(msgspec.Struct):
    """The body of ``/abort_request``: a prefix of request ids, or all requests."""

    rid: str = ""
    abort_all: bool = False

    def __post_init__(self) -> None:
        if not self.rid and not self.abort_all:
            raise ValueError("abort_request needs a rid, which is a prefix, or abort_all = true")


class PauseBody(msgspec.Struct):
    mode: Literal["retract"]


class MemoryBody(msgspec.Struct):
    """The body of the routes for sleep and wake. All memory is released at once, so there are no ``tags``."""

    tags: None = None


class GroupBody(msgspec.Struct):
    master_address: str
    master_port: Annotated[int, Meta(ge=1, lt=2**16)]
    rank_offset: Annotated[int, Meta(ge=1)]
    world_size: Annotated[int, Meta(le=_MAX_WORLD_SIZE)]
    group_name: str
    backend: Literal["gloo", "nccl"]
    piece_bytes: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.rank_offset >= self.world_size:
            raise ValueError(
                f"rank_offset must be below world_size = {self.world_size}, got {self.rank_offset}"
            )


class BucketBody(msgspec.Struct):
    """Fields of ``/update_weights_from_distributed`` besides those of a :class:`BucketSpec`."""

    group_name: str
    load_format: Literal["flattened_bucket"]
    sequence: int | None = None
    weight_version: str | None = None


class DiskBody(msgspec.Struct):
    model_path: str
    weight_version: str


class EndBody(msgspec.Struct):
    weight_version: str | None = None


class VersionBody(msgspec.Struct):
    new_version: str


async def read(http: web.Request) -> bytes:
    """Returns the body of a request. An empty body is read as an empty JSON object."""
    return (await read_body(http, _MAX_BODY_BYTES)).strip() or b"{}"


def parse(content: bytes, kind: type[_T]) -> _T:
    """Parses a request's body; raises a ValueError that names the wrong field."""
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError as error:
        raise ValueError("The body must be JSON with fewer brackets in each other.") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"The body cannot be used: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"The body must be JSON in UTF-8: {error}.") from error


def format_answer(request: Request) -> dict[str, Any]:
    output_ids, segments = request.output_ids, request.segments
    ends = [start for _, start in segments[1:]] + [len(output_ids)]
    meta: dict[str, Any] = {
        "id": request.request_id,
        "finish_reason": request.finish_reason,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(output_ids),
        "cached_tokens": request.shared_prompt_tokens,
        "weight_version": segments[-1][0],
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(segments, ends, strict=True)
            if end > start
        ],
        "output_token_logprobs": [
            [logprob, token, None]
            for logprob, token in zip(request.logprobs, output_ids, strict=True)
        ],
    }
    if request.logprob_start is not None:
        meta |= _rating_fields(request, request.logprob_start)
    return {"output_ids": output_ids, "meta_info": meta}


def format_chat_answer(request: Request, text: str, model: str) -> dict[str, Any]:
    message, reason = {"role": "assistant", "content": text}, request.finish_reason or {}
    usage = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": len(request.output_ids)}
    return {
        "id": request.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason.get("type")}],
        "usage": usage | {"total_tokens": request.length},
    }


def _rating_fields(request: Request, start: int) -> dict[str, Any]:
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


def success(message: str, **more: Any) -> web.Response:
    return web.json_response({"success": True, "message": message, **more})


def error_response(status: int, message: str) -> web.Response:
    return web.json_response(
        {"success": False, "message": message, "error": {"message": message, "code": status}},
        status=status,
    )
