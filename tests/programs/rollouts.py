# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Completions and rollouts as tests need them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchtitan.grpo.types import Generation, Rollout, RolloutGroup, VersionSegment


def _fields(
    tokens: int | Sequence[int],
    logprobs: float | Sequence[float],
    version: int,
    more: dict[str, Any],
) -> dict[str, Any]:
    ids = np.array([5] * tokens if isinstance(tokens, int) else tokens, np.int32)
    return {
        "token_ids": ids,
        "logprobs": np.broadcast_to(np.array(logprobs, np.float32), ids.shape).copy(),
        "finish_reason": "stop",
        "segments": (VersionSegment(version, 0, len(ids)),),
    } | more


def generation(
    tokens: int | Sequence[int],
    logprobs: float | Sequence[float] = -0.5,
    version: int = 0,
    **more: Any,
) -> Generation:
    return Generation(**_fields(tokens, logprobs, version, more))


def rollout(
    tokens: int | Sequence[int],
    reward: float | None = 1.0,
    logprobs: float | Sequence[float] = -0.5,
    version: int = 0,
    **more: Any,
) -> Rollout:
    """Returns a rollout of these tokens, or of this many tokens; ``more`` sets other fields."""
    common = {"prompt_ids": np.array([1, 2], np.int32), "completion": "", "reward": reward}
    return Rollout(**_fields(tokens, logprobs, version, common | more))


def group(group_id: int, *rollouts: Rollout, **more: Any) -> RolloutGroup:
    return RolloutGroup(
        **{"group_id": group_id, "prompt_text": "", "rollouts": rollouts, "server_url": ""} | more
    )


def assert_same(found: Any, expected: Any) -> None:
    """Compares dataclasses, and what they hold, to the last bit of each array."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes() and found.flags.aligned
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected
