# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds requests to SGLang's routes and parses their answers. The embedded server has the same routes."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torchtitan.grpo.inference.answers import (
    as_object,
    checked_generation,
    checked_load,
    checked_rating,
    logit_bias,
    reading,
    to_number,
)
from torchtitan.grpo.inference.client import LogprobsError, PromptRating, ServerLoad
from torchtitan.grpo.inference.http import excerpt
from torchtitan.grpo.inference.kinds import kind_row
from torchtitan.grpo.types import GenerateRequest, Generation
from torchtitan.grpo.weight_wire.group_facts import GroupFacts

_REQUIRED_TORCH = {"0.5.20": "2.13.0", "0.5.21": "2.13.0", "0.5.22": "2.14.1", "0.5.23": "2.14.1"}
"""The version of torch that a release's package requires."""
# Pattern of a checkpoint name, and the name of the fused parameter that may hold the weights.
_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
# A model with tied embeddings holds the output matrix as its embedding.
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def generate_body(request: GenerateRequest) -> dict[str, Any]:
    seed = {} if request.seed is None else {"sampling_seed": request.seed}
    return {
        "rid": server_id(request.request_id),
        "input_ids": request.prompt_ids,
        "return_logprob": True,
        "logprob_start_len": -1,  # of the completion only
        "stream": False,
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop_token_ids": list(request.stop_token_ids),
            "ignore_eos": request.ignore_eos,
            **seed,
            **logit_bias(request),
        },
    }


def parse_generation(source: str, request: GenerateRequest, body: Any) -> Generation:
    body = as_object(body, source)
    wanted = "output_ids and meta_info with id, logprobs, finish reason and weight version"
    with reading(source, body, wanted):
        meta = body["meta_info"]
        token_ids = body["output_ids"]
        if meta.get("output_token_logprobs") is None:
            raise LogprobsError(
                f"{source}: the answer holds no logprobs of its tokens, got {excerpt(body)}"
            )
        spans = meta.get("weight_versions")
        if spans is None:
            # Older releases report one version, that of the end of the completion.
            spans = [{"version": meta["weight_version"], "start": 0, "end": len(token_ids)}]
        return checked_generation(
            source,
            request,
            sent_id=server_id(request.request_id),
            answered_id=meta["id"],
            num_prompt_tokens=meta["prompt_tokens"],
            token_ids=token_ids,
            logprobs=[(entry[0], entry[1]) for entry in meta["output_token_logprobs"]],
            num_completion_tokens=meta["completion_tokens"],
            finish_reason=meta["finish_reason"]["type"],
            spans=[(span["version"], span["start"], span["end"]) for span in spans],
        )


def server_id(request_id: str) -> str:
    # SGLang aborts by prefix. With its length in front, no id is a prefix of another one.
    return f"{len(request_id)}:{request_id}"


def rating_body(
    sequences: Sequence[list[int]], starts: Sequence[int], num_top: int
) -> dict[str, Any]:
    """Returns the body of ``POST /generate`` for a rating; see :meth:`InferenceClient.rate`."""
    return {
        "input_ids": list(sequences),
        "return_logprob": True,
        # The answer begins with this token, but the server gives it no logprob.
        "logprob_start_len": [start - 1 for start in starts],
        "top_logprobs_num": num_top,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }


def parse_rating(
    source: str, token_ids: list[int], start: int, num_top: int, body: Any
) -> PromptRating:
    """Returns the logprobs of a sequence's tokens from ``start`` on. ``body`` is its part of the answer."""
    sent = token_ids[start - 1 :]
    wanted = f"meta_info.input_token_logprobs of the {len(sent)} tokens asked for"
    if num_top:
        wanted += " and input_top_logprobs, as top_logprobs_num is set"
    with reading(source, body, wanted):
        meta = body["meta_info"]
        # SGLang reports the last id of the vocabulary as 0 here, with the right logprob.
        entries = [
            (entry[0], token if entry[1] == 0 else entry[1])
            for entry, token in zip(meta["input_token_logprobs"], sent, strict=True)
        ]
        rows = []
        if num_top:
            _, *places = meta["input_top_logprobs"]
            rows = [
                [(entry[0], entry[1]) for entry in place]
                for place, _ in zip(places, sent[1:], strict=True)
            ]
    return checked_rating(source, sent, entries, rows, num_top)


def parse_loads(source: str, body: Any) -> ServerLoad:
    """Returns the server's load from an answer of ``/v1/loads``, which has one entry for each rank."""
    with reading(source, body, "loads with num_running_reqs, num_waiting_reqs and token_usage"):
        ranks = body["loads"]
        return checked_load(
            source,
            [to_number(rank["num_running_reqs"]) for rank in ranks],
            [to_number(rank["num_waiting_reqs"]) for rank in ranks],
            [to_number(rank["token_usage"]) for rank in ranks],
            # Of the embedded server alone.
            [to_number(rank.get("prefill_seconds", 0.0)) for rank in ranks],
            [to_number(rank.get("decode_seconds", 0.0)) for rank in ranks],
        )


def facts_of_server(info: Mapping[str, Any]) -> GroupFacts:
    device, release = info.get("device"), str(info.get("version"))
    required = _REQUIRED_TORCH.get(".".join(release.split(".")[:3]))
    torch = "" if required is None else f" requires torch {required} and"
    values = " and ".join(
        f"{name}={value}" for name, value in kind_row("sglang").nccl_settings.items()
    )
    return GroupFacts(
        device=device if device in ("cpu", "cuda") else None,
        hint=f"SGLang {release}{torch} sets {values} unless its environment names other values.",
    )


def unknown_names(names: Iterable[str], held: Collection[str]) -> list[str]:
    """Returns the Hugging Face names that belong to none of the parameters that a server holds.

    >>> unknown_names(["model.layers.0.self_attn.k_proj.weight", "typo.weight"],
    ...               {"model.layers.0.self_attn.qkv_proj.weight"})
    ['typo.weight']
    """
    return [name for name in names if not any(alias in held for alias in _aliases(name))]


def checksum_names(body: Any) -> frozenset[str]:
    ranks = body.get("ranks") if isinstance(body, dict) else None
    named = (rank.get("checksums", ()) for rank in ranks or () if isinstance(rank, dict))
    return frozenset(name for names in named for name in names)


def _aliases(name: str) -> Iterable[str]:
    yield name
    for pattern, fused in _FUSED:
        if pattern.search(name):
            yield pattern.sub(fused, name)
    if name in _TIED:
        yield _TIED[name]
