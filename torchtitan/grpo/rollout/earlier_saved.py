# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Reads files of saved rollouts that earlier releases wrote, which had one frame for each column."""

from typing import Any

import msgspec
import numpy as np

from torchtitan.grpo.types import Generation, Rollout, columns_of

_FRAMES = (
    "prompt_ids", "token_ids", "logprobs", "sampled", "teacher_logprobs", "teacher_top_ids",
    "teacher_top_logprobs",
)  # fmt: skip


class _Frames:
    """The arrays of all groups, each read from its beginning to its end."""

    def __init__(self, frames: list[bytes]) -> None:
        columns = columns_of(Rollout)
        self._arrays: dict[str, np.ndarray] = {
            name: np.frombuffer(frame, columns[name].dtype if name in columns else np.int32)
            for name, frame in zip(_FRAMES, frames, strict=False)
        }
        self._positions: dict[str, int] = dict.fromkeys(_FRAMES, 0)

    def take(self, name: str, length: int) -> np.ndarray:
        begin, end = self._positions[name], self._positions[name] + length
        self._positions[name] = end
        if not 0 <= begin <= end <= len(self._arrays[name]):
            raise ValueError("its arrays are shorter than its header says")
        return self._arrays[name][begin:end]


def unpack_earlier(content: msgspec.Raw) -> dict[str, Any]:
    file = msgspec.msgpack.decode(content)
    frames = _Frames(file["frames"])
    return {
        "version": file["version"],
        "progress": {"position": file["position"], "open": file["open"]},
        "closed": file["closed"],
        "finished": [_group(group, frames) for group in file["finished"]],
        "unfinished": [
            group | {name: list(map(_generation, group[name])) for name in ("generations", "begun")}
            for group in file["unfinished"]
        ],
    }


def _group(group: dict[str, Any], frames: _Frames) -> dict[str, Any]:
    prompt_ids = frames.take("prompt_ids", group["prompt_len"])
    rollouts = [_rollout(one, frames) | {"prompt_ids": prompt_ids} for one in group["rollouts"]]
    return group | {"rollouts": rollouts}


def _rollout(one: dict[str, Any], frames: _Frames) -> dict[str, Any]:
    length, num_top = one["num_tokens"], one.get("num_top", 0)
    names = ["token_ids", "logprobs"]
    names += ["sampled"] if one.get("has_mask") else []
    names += ["teacher_logprobs"] if one.get("is_rated") else []
    arrays = {name: frames.take(name, length) for name in names}
    if num_top:
        for name in ("teacher_top_ids", "teacher_top_logprobs"):
            arrays[name] = frames.take(name, length * num_top).reshape(length, num_top)
    return one | arrays


def _generation(one: dict[str, Any]) -> dict[str, Any]:
    columns = columns_of(Generation)
    arrays = {
        name: np.frombuffer(one[name], column.dtype)
        for name, column in columns.items()
        if one.get(name) is not None
    }
    return one | arrays
