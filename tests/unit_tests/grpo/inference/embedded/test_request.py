# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One request of the embedded server: how it ends, and which version wrote which token."""

import math
from typing import Any

import pytest

from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import SamplingParams

STOP = 9


def make_request(max_new_tokens: int) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    request = Request("r", [1, 2], params, frozenset({STOP}), False, lambda *_: None)
    request.start_segment("1")
    return request


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([3, STOP], {"type": "stop", "matched": STOP}),
        ([3, 4, STOP], {"type": "stop", "matched": STOP}),  # the last token that is allowed
        ([3, 4, 5], {"type": "length", "length": 3}),
    ],
)
def test_a_stop_token_ends_a_request_even_as_the_last_that_is_allowed(
    tokens: list[int], reason: dict[str, Any]
) -> None:
    request = make_request(3)
    assert [request.append(token, -1.0) for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert request.finish_reason == reason


def test_a_logprob_that_is_not_a_number_aborts_and_its_token_is_not_kept() -> None:
    request = make_request(3)
    request.append(3, -1.0)
    assert request.append(4, math.nan)
    assert request.finish_reason is not None
    assert request.finish_reason["type"] == "abort"
    assert (request.output_ids, request.logprobs) == ([3], [-1.0])


def test_a_version_that_wrote_no_token_has_no_segment() -> None:
    request = make_request(9)
    request.append(3, -1.0)
    request.start_segment("2")
    request.start_segment("3")
    request.append(4, -1.0)
    assert request.segments == [("1", 0), ("3", 1)]
