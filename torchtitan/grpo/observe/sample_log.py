# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes some groups of rollouts of each step as the model saw them."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Rollout, RolloutGroup

_INDENT = "    "
_MOST_TOKENS = 2**15
"""Their lists take about 4 µs and 30 bytes a token, on a thread of their own."""

Advantages = Mapping[int, Sequence[float | None]]
"""For each ``group_id`` the advantage of each rollout; None where it is not known."""

Member = tuple[int, int]
"""A rollout: the ``group_id``, and the place in the group."""


class SampleLog:
    """Writes a few groups of each step to ``samples.jsonl``, and keeps the ``latest`` records."""

    def __init__(self, path: Path, per_step: int, step: int, codec: TextCodec | None) -> None:
        assert codec is not None or per_step == 0, "what is written must be decoded"
        self._per_step = per_step
        self._log = RunLog(path, step)
        self._codec = codec
        self.latest: list[dict[str, Any]] = []  # without the lists of tokens
        # Training goes on while this thread makes the lists of tokens and writes the file.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None

    def write(
        self,
        step: int,
        groups: Iterable[RolloutGroup],
        advantages: Advantages,
        trained: Collection[Member] = (),
        of_tokens: Mapping[Member, np.ndarray] | None = None,
    ) -> None:
        """Writes all rollouts of the first groups, including those that were left out of training.

        ``of_tokens`` has for trained rollouts [2, trained tokens]: the logarithm of the trainer's over the
        server's probability, and the advantage. Once a step has ``_MOST_TOKENS``, further completions are
        written without lists of tokens.
        """
        self._wait()
        self.latest, of_latest, num_tokens = [], [], 0
        for number, group in enumerate(list(groups)[: self._per_step], 1):
            for i, rollout in enumerate((*group.rollouts, *group.left_out)):
                record = self._record(group, i, advantages)
                member, tokens = (group.group_id, i), None
                if num_tokens < _MOST_TOKENS:
                    values, is_trained = (of_tokens or {}).get(member), member in trained
                    tokens = partial(self._tokens, rollout, is_trained, record["advantage"], values)
                num_tokens += len(rollout.token_ids)
                self.latest.append({"step": step, "number": number} | record)
                of_latest.append(tokens)
        self._writing = self._thread.submit(self._write, self.latest, of_latest)

    def close(self) -> None:
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            self._log.close()

    def _wait(self) -> None:
        """Waits until the records of the step before are written, and raises what went wrong there."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(
        self,
        records: Sequence[dict[str, Any]],
        of_tokens: Sequence[Callable[[], dict[str, Any]] | None],
    ) -> None:
        for record, tokens in zip(records, of_tokens, strict=True):
            more = {} if tokens is None else {"tokens": tokens()}
            self._log.add(record | more, (",", ":"))

    def _record(self, group: RolloutGroup, i: int, known: Advantages) -> dict[str, Any]:
        assert self._codec is not None, "no sample is written without a tokenizer"
        rollouts = (*group.rollouts, *group.left_out)
        rollout = rollouts[i]
        advantages = [*known.get(group.group_id, ()), *(None for _ in rollouts)]
        return {
            "group_id": group.group_id,
            "row": group.row,
            "prompt": group.prompt_text,
            "completion": rollout.completion,
            "reward": rollout.reward,
            "reward_components": rollout.reward_components,
            "unscored": rollout.unscored,
            "left_out": i >= len(group.rollouts),
            "advantage": advantages[i],
            "group_rewards": [r.reward for r in rollouts],
            "finish_reason": rollout.finish_reason,
            "versions": [[s.version, s.start, s.end] for s in rollout.segments],
            "server": group.server_url,
            "is_chat": group.is_chat,
            "columns": group.columns,
            "logged": rollout.logged,
            "context": turns(rollout, self._codec),
        }

    def _tokens(
        self, rollout: Rollout, is_trained: bool, advantage: float | None, values: np.ndarray | None
    ) -> dict[str, list[Any]]:
        """Returns lists with an entry for each token behind the first prompt; null where not known."""
        assert self._codec is not None, "no sample is written without a tokenizer"
        sampled = np.ones(len(rollout.token_ids), np.bool_)
        sampled = sampled if rollout.sampled is None else rollout.sampled
        trained = sampled & is_trained
        found: dict[str, list[Any]] = {
            "text": self._codec.pieces(rollout.token_ids.tolist()),
            "logprob": _numbers(np.asarray(rollout.logprobs)[sampled], sampled),
            "trained": trained.astype(int).tolist(),
        }
        known = np.full((2, np.count_nonzero(trained)), np.nan)
        if values is not None and values.shape == known.shape:  # a log must not end a run
            known = values.astype(np.float64)
        log_ratios, advantages = known
        if np.isfinite(log_ratios).any():
            with np.errstate(over="ignore"):
                found["ratio"] = _numbers(np.exp(log_ratios), trained)
        elif advantage is not None:  # the policy did not learn in this step
            advantages = np.full(len(advantages), advantage)
        if np.isfinite(advantages).any():
            found["advantage"] = _numbers(advantages, trained)
        return found


def _numbers(values: np.ndarray, where: np.ndarray) -> list[float | None]:
    """Returns rounded numbers: the values at the tokens ``where``, and null elsewhere."""
    whole = np.full(len(where), np.nan)
    whole[where] = values
    rounded = np.round(whole, 4).tolist()
    return [number if math.isfinite(number) else None for number in rounded]


def turns(rollout: Rollout, codec: TextCodec) -> list[dict[str, Any]]:
    """Returns a rollout's whole context, special tokens included, in parts labeled by who wrote them.

    A ``role`` is ``prompt``, ``model``, ``environment``, or ``older model`` (``rollout.overdue``). The role
    ``new row`` begins another context, as an agent may send: the model saw none of the parts before it.
    """
    ids = rollout.token_ids.tolist()
    inserted = "older model" if rollout.num_context else "environment"
    begins = [("prompt", rollout.prompt_ids.tolist(), 0)]
    begins += [("new row", ids[start : start + n], start + n) for start, n in rollout.new_rows]
    ends = [*(start for start, _ in rollout.new_rows), len(ids)]
    found = []
    for (role, shown, begin), end in zip(begins, ends, strict=True):
        if end == 0 and rollout.new_rows:
            continue  # nothing was written behind the prompt of the data
        parts = [(role, False, shown)]
        for is_trained, first, last in _spans(rollout, begin, end):
            parts.append(("model" if is_trained else inserted, is_trained, ids[first:last]))
        texts = _texts([part for *_, part in parts], codec)
        found += [
            {"role": role, "trained": is_trained, "num_tokens": len(part), "text": text}
            for (role, is_trained, part), text in zip(parts, texts, strict=True)
        ]
    return found


def _spans(rollout: Rollout, begin: int, end: int) -> list[tuple[bool, int, int]]:
    if begin == end:
        return []
    if rollout.sampled is None:
        return [(True, begin, end)]
    sampled = rollout.sampled[begin:end]
    borders = [begin, *(np.flatnonzero(np.diff(sampled)) + begin + 1).tolist(), end]
    return [(bool(sampled[i - begin]), i, j) for i, j in itertools.pairwise(borders)]


def _texts(parts: Sequence[list[int]], codec: TextCodec) -> list[str]:
    """Returns the text of each part of a sequence, decoded together with everything before the part.

    Decoded alone, a part could lose a space at its beginning, or half of a character.
    """
    found, before, ids = [], "", list[int]()
    for part in parts:
        ids += part
        whole = codec.decode_exactly(ids)
        is_longer = whole.startswith(before)
        found.append(whole[len(before) :] if is_longer else codec.decode_exactly(part))
        before = whole
    return found


def group_texts(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the text of each group of a step, with the prompt once."""
    for _, same in itertools.groupby(records, lambda record: record["group_id"]):
        yield _group_text(list(same))


def _group_text(records: Sequence[Mapping[str, Any]]) -> str:
    first = records[0]
    where = f" ({row})" if (row := first.get("row")) else ""
    lines = [f"step {first['step']}, prompt {first['group_id']}{where}:"]
    lines += [f"  column {name}: {value!r}" for name, value in first["columns"].items()]
    shown = ([turn for turn in r["context"] if turn["role"] == "prompt"] for r in records)
    lines += _turn_lines(next(filter(None, shown), []))  # not all need begin with it
    for number, record in enumerate(records, 1):
        components = ", ".join(f"{k} {v:.4g}" for k, v in record["reward_components"].items())
        advantage = record["advantage"]
        value, cause = record["reward"], record["unscored"]
        reward = f"reward {value:.4g} ({components})" if value is not None else "no reward"
        no_advantage = "left out" if record["left_out"] else "advantage not known"
        facts = [
            f"{reward}, unscored by {cause}" if cause else reward,
            f"advantage {advantage:+.4g}" if advantage is not None else no_advantage,
            f"ended by {record['finish_reason']}",
            "versions " + ", ".join(str(version) for version, _, _ in record["versions"]),
        ]
        lines.append(f"  completion {number} of {len(records)}: {'; '.join(facts)}")
        lines += [f"  logged {name}: {value!r}" for name, value in record["logged"].items()]
        lines += _turn_lines(turn for turn in record["context"] if turn["role"] != "prompt")
    return "\n".join(lines)


def _turn_lines(context: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for turn in context:
        trained = "trained" if turn["trained"] else "not trained"
        yield f"  [{turn['role']}, {turn['num_tokens']} tokens, {trained}]"
        yield from (_INDENT + line for line in turn["text"].split("\n"))
