# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes some rollouts of each step as the model saw them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Rollout, RolloutGroup

_INDENT = "    "

Advantages = Mapping[int, Sequence[float | None]]
"""For each ``group_id`` the advantage of each rollout; None where it is not known."""


class SampleLog:
    """Writes a few rollouts of each step to ``samples.jsonl``, and keeps the ``latest`` records."""

    def __init__(self, path: Path, per_step: int, step: int, codec: TextCodec | None) -> None:
        assert codec is not None or per_step == 0, "what is written must be decoded"
        self._per_step = per_step
        self._log = RunLog(path, step)
        self._codec = codec
        self.latest: list[dict[str, Any]] = []

    def write(self, step: int, groups: Iterable[RolloutGroup], advantages: Advantages) -> None:
        """Writes the first rollout of each of the first groups, so that the prompts differ."""
        self.latest = [
            {"step": step} | self._record(group, advantages)
            for group in list(groups)[: self._per_step]
        ]
        for record in self.latest:
            self._log.add(record)

    def close(self) -> None:
        self._log.close()

    def _record(self, group: RolloutGroup, advantages: Advantages) -> dict[str, Any]:
        assert self._codec is not None, "no sample is written without a tokenizer"
        rollout = group.rollouts[0]
        of_group = advantages.get(group.group_id)
        return {
            "group_id": group.group_id,
            "prompt": group.prompt_text,
            "completion": rollout.completion,
            "reward": rollout.reward,
            "reward_components": rollout.reward_components,
            "advantage": of_group[0] if of_group else None,
            "group_rewards": [r.reward for r in group.rollouts],
            "finish_reason": rollout.finish_reason,
            "versions": [[s.version, s.start, s.end] for s in rollout.segments],
            "server": group.server_url,
            "is_chat": group.is_chat,
            "columns": group.columns,
            "logged": rollout.logged,
            "context": turns(rollout, self._codec),
        }


def turns(rollout: Rollout, codec: TextCodec) -> list[dict[str, Any]]:
    """Returns the whole context of a rollout, with special tokens, in parts of different writers.

    A ``role`` is ``prompt``, ``model``, ``environment``, or ``older model`` (``rollout.overdue``).
    """
    ids = np.concatenate([rollout.prompt_ids, rollout.token_ids]).tolist()
    begin = len(rollout.prompt_ids)
    parts = [("prompt", False, 0, begin)]
    inserted = "older model" if rollout.num_context else "environment"
    for is_trained, start, end in _spans(rollout):
        role = "model" if is_trained else inserted
        parts.append((role, is_trained, begin + start, begin + end))
    texts = _texts(ids, [end for *_, end in parts], codec)
    return [
        {"role": role, "trained": is_trained, "num_tokens": end - start, "text": text}
        for (role, is_trained, start, end), text in zip(parts, texts, strict=True)
    ]


def _spans(rollout: Rollout) -> list[tuple[bool, int, int]]:
    length = len(rollout.token_ids)
    if not length:
        return []
    if rollout.sampled is None:
        return [(True, 0, length)]
    borders = [0, *(np.flatnonzero(np.diff(rollout.sampled)) + 1).tolist(), length]
    sampled = rollout.sampled.tolist()
    return [(sampled[start], start, end) for start, end in itertools.pairwise(borders)]


def _texts(ids: list[int], ends: list[int], codec: TextCodec) -> list[str]:
    """Returns the text of each part of a sequence, decoded with everything before it.

    Some tokenizers drop a space at the beginning, and a character may have tokens of two parts.
    """
    found, before, start = [], "", 0
    for end in ends:
        whole = codec.decode_exactly(ids[:end])
        is_longer = whole.startswith(before)
        found.append(whole[len(before) :] if is_longer else codec.decode_exactly(ids[start:end]))
        before, start = whole, end
    return found


def sample_text(record: Mapping[str, Any]) -> str:
    components = ", ".join(f"{k} {v:.4g}" for k, v in record["reward_components"].items())
    advantage = record["advantage"]
    facts = [
        f"reward {record['reward']:.4g} ({components})",
        f"advantage {advantage:+.4g}" if advantage is not None else "advantage not known",
        f"ended by {record['finish_reason']}",
        "versions " + ", ".join(str(version) for version, _, _ in record["versions"]),
    ]
    lines = [f"sample of step {record['step']}, group {record['group_id']}: {'; '.join(facts)}"]
    lines += [f"  column {name}: {value!r}" for name, value in record["columns"].items()]
    lines += [f"  logged {name}: {value!r}" for name, value in record["logged"].items()]
    for turn in record["context"]:
        trained = "trained" if turn["trained"] else "not trained"
        lines.append(f"  [{turn['role']}, {turn['num_tokens']} tokens, {trained}]")
        lines += [_INDENT + line for line in turn["text"].split("\n")]
    return "\n".join(lines)
