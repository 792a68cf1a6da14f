# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import math
from dataclasses import replace

import numpy as np
import pytest
from rollouts import rollout

from torchtitan.grpo.rollout.completion_checks import rollout_problem
from torchtitan.grpo.types import VersionSegment, columns_of

TOP_IDS, TOP_LOGPROBS = [[7, 1], [8, 2]], [[-1, -1], [-1, -1]]


def problem(**changes) -> str | None:
    """The fault of a rollout of two tokens with these fields."""
    fields = {"prompt_ids": [5, 6], "token_ids": [7, 8], "logprobs": [-1, -2]} | changes
    made = rollout([7, 8])
    columns = {name: column.dtype for name, column in columns_of(type(made)).items()}
    for name, dtype in (columns | {"prompt_ids": np.int32}).items():
        if fields.get(name) is not None:
            with np.errstate(over="ignore"):
                fields[name] = np.array(fields[name]).astype(dtype)
    if "segments" in fields:
        fields["segments"] = tuple(VersionSegment(*segment) for segment in fields["segments"])
    return rollout_problem(replace(made, **fields), vocab_size=100, row_len=10)


def cases(message: str, name: str, *values) -> list:
    return [({name: value}, message) for value in values]


def top(ids, logprobs=TOP_LOGPROBS) -> dict:
    return {"teacher_top_ids": ids, "teacher_top_logprobs": logprobs}


BAD = [
    *cases("its token ids are 7 to 100, expected 0 to 99", "token_ids", [7, 100]),
    *cases("its token ids are -1 to 7", "token_ids", [-1, 7]),
    *cases("it has no token", "token_ids", []),
    *cases("the prompt must have token ids in [0, 100)", "prompt_ids", [5, 100], [-1], []),
    *cases("its 1 logprobs are not one for each of 2 completion tokens", "logprobs", [-1.0]),
    *cases(
        "its logprobs must be finite, above -87.337", "logprobs",
        *([-1, x] for x in (-87.4, -104, -9999, 0.1, 1e30, math.inf, -math.inf, math.nan)),
    ),
    *cases(
        "its version segments ", "segments",
        [], [(0, 0, 1)], [(0, 1, 2)], [(0, 0, 3)], [(0, 0, 1), (0, 0, 2)], [(-2, 0, 2)],
        [(0, 0, 2), (0, 2, 2)], [(0, 0, -2), (0, -2, 2)],
    ),
    *cases("rewards must be numbers between -1e+12 and 1e+12", "reward", 1e30, -1e13, math.nan, math.inf),
    *cases("rewards must be numbers", "reward_components", {"exact": 1e30}, {"exact": -math.inf}),
    *cases("num_context must be in [0, 0], got 1", "num_context", 1),
    *cases("new_rows must be ascending places", "new_rows", ((1, 1),), ((-1, 1),)),
    (
        {"token_ids": [7] * 9, "logprobs": [-1.0] * 9, "segments": [(0, 0, 9)]},
        "at most training.seq_len (10) tokens, got 11",
    ),
    *cases("its 1 teacher_logprobs are not one for each of 2", "teacher_logprobs", [-1.0]),
    *cases(
        "teacher_logprobs must be finite, above -9999", "teacher_logprobs",
        [-1, -1e300], [-1, -9999.0], [-1, 0.5],
    ),
    (top([[7, 1]], [[-1, -1]]), "its 1 teacher_top_ids are not one for each of 2"),
    (top(TOP_IDS, None), "must have equally many values"),
    (top(TOP_IDS, [[-1], [-1]]), "must have equally many values"),
    (top(np.zeros((2, 0)), np.zeros((2, 0))), "must have equally many values, at least one"),
    (top([[7, 1], [8, 100]]), "teacher_top_ids must be in [0, 100)"),
    (top([[7, 1], [-8, 2]]), "teacher_top_ids must be in"),
    (top([[7, 1], [2, 2]]), "teacher_top_ids must be different at each token"),
    (top(TOP_IDS, [[-1, -2], [-1, -np.inf]]), "teacher_top_logprobs must be finite"),
    (top(TOP_IDS, [[-1, -2], [-9999, -1]]), "got -9999.0 at token 1"),
    (top(TOP_IDS, [[-1, 1e30], [-3, -1]]), "at token 0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_what_cannot_be_trained_on_is_named(changes, message):
    assert message in (problem(**changes) or "")


def test_what_a_run_trains_on_has_no_fault():
    assert problem() is None
    assert problem(sampled=[True, False], num_context=1, logprobs=[-87.0, 0]) is None
    assert problem(teacher_logprobs=[-1, -2], **top(TOP_IDS)) is None
