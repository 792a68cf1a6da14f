# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Requests to SGLang for the logprobs of given tokens, and its answers."""

from collections.abc import Sequence
from typing import Any

from torchtitan.grpo.inference.answers import (
    MALFORMED,
    checked_prompt_logprobs,
    checked_top_tokens,
)
from torchtitan.grpo.inference.client import PromptRating, ServerError
from torchtitan.grpo.inference.http import excerpt


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
    """Returns the rating of the tokens from ``start`` on, out of one entry of the answer.

    Raises:
        ServerError: If the answer is about other tokens, or some are missing.
    """
    sent = token_ids[start - 1 :]
    try:
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
    except MALFORMED as error:
        raise ServerError(
            f"{source}: the answer must hold meta_info.input_token_logprobs of the {len(sent)} tokens "
            f"asked for, and input_top_logprobs if top_logprobs_num is set ({type(error).__name__}: "
            f"{error}), got {excerpt(body)}"
        ) from error
    logprobs = checked_prompt_logprobs(source, sent, entries)
    return PromptRating(logprobs, checked_top_tokens(source, rows, num_top) if num_top else None)
