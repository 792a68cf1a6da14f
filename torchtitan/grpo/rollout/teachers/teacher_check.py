# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides whether a server can be the teacher of a run.

A teacher rates token ids, so each id must mean the same token to teacher and student. A teacher must
also remain the same model: whenever it was lost, it rates fixed tokens again, as at the start.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.grpo.inference.client import InferenceClient, ServerError, ServerFacts
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.inference.join_check import WrongServer
from torchtitan.grpo.rollout.tokenizer import TextCodec

MOST_FURTHER_TOKENS = 128
"""Number of tokens that a teacher may have beyond those of the student, with ``teacher.top_k``."""

_PROBE_LENGTH = 32
# Kernels of one server round differently from call to call, far less than models differ.
_SAME_MODEL_NATS = 0.1


@dataclass(frozen=True)
class TeacherNeeds:
    """What a teacher must fit: the trained model's vocabulary, and the length of its longest text.

    ``model_path`` has the teacher's tokenizer. If it is None, the directory that the server names is used.
    """

    vocabulary: Mapping[str, int]
    vocab_size: int
    num_tokens: int
    model_path: str | None
    top_k: int = 0

    def probe(self) -> list[int]:
        generator = random.Random(20)
        length = max(2, min(_PROBE_LENGTH, self.num_tokens))
        return [generator.randrange(self.vocab_size) for _ in range(length)]


@dataclass(frozen=True)
class TeacherProbe:
    """A teacher's rating of the probe tokens.

    ``num_top`` is how many of its most likely tokens the teacher must return for each position, so
    that at least ``teacher.top_k`` of them are in the student's vocabulary.
    """

    logprobs: list[float]
    num_top: int


async def check_teacher(client: InferenceClient, needs: TeacherNeeds) -> TeacherProbe:
    """Checks a running server and returns its rating of the probe tokens.

    Raises WrongServer if it cannot be a teacher, and RouteError if it fails or does not answer.
    """
    try:
        facts = await client.describe(1.0)
        # In a thread: a large vocabulary takes about a second, in which no rollout would go on.
        problems = await asyncio.to_thread(_vocabulary_problems, facts, needs)
        problems = [*_size_problems(facts, needs), *problems]
        if not problems:
            num_top = needs.top_k and needs.top_k + _num_further(facts, needs)
            return await rate_probe(client, needs, num_top)
    except RouteError as error:
        if not error.is_refusal:
            raise
        problems = [str(error)]
    except ServerError as error:
        problems = [str(error)]
    raise _wrong_teacher(client.url, problems)


async def rate_probe(client: InferenceClient, needs: TeacherNeeds, num_top: int) -> TeacherProbe:
    (rating,) = await client.rate([needs.probe()], [1], num_top)
    return TeacherProbe(rating.logprobs, num_top)


def check_same_model(url: str, first: TeacherProbe, now: TeacherProbe) -> None:
    """Raises WrongServer unless a teacher now rates the probe tokens as it did at the start."""
    pairs = list(zip(first.logprobs, now.logprobs, strict=True))
    difference = sum(abs(a - b) for a, b in pairs) / len(pairs)
    if first.num_top != now.num_top:
        raise _wrong_teacher(
            url,
            ["all teachers must have the same vocabulary, but its size differs from the first's"],
        )
    if not difference <= _SAME_MODEL_NATS:
        raise _wrong_teacher(
            url,
            [
                "all teachers must serve the model that the run began with, but it rates fixed tokens "
                f"otherwise, by {difference:.3g} nats on average (at most {_SAME_MODEL_NATS:g}). Serve "
                "the same weights there again; a run with another teacher is a new run"
            ],
        )


def _num_further(facts: ServerFacts, needs: TeacherNeeds) -> int:
    return max(0, (facts.vocab_size or 0) - needs.vocab_size)


def _size_problems(facts: ServerFacts, needs: TeacherNeeds) -> list[str]:
    problems = []
    if facts.vocab_size is not None and facts.vocab_size < needs.vocab_size:
        problems.append(
            f"its vocabulary has {facts.vocab_size} tokens, and that of the trained model has "
            f"{needs.vocab_size}, so that it could not rate each of them"
        )
    further = _num_further(facts, needs)
    if needs.top_k and further > MOST_FURTHER_TOKENS:
        problems.append(
            f"its vocabulary has {further} tokens more than that of the trained model, and with "
            f"teacher.top_k it may have at most {MOST_FURTHER_TOKENS} more: it must also be asked "
            "for all of these tokens, because the trained model cannot write them. Choose a "
            "teacher with the same vocabulary, or set teacher.top_k = 0"
        )
    length = facts.max_model_len
    needed = needs.num_tokens + 1  # servers reserve room for a token after those that they rate
    if length is not None and length < needed:
        problems.append(
            f"it takes at most {length} tokens, but a prompt and its completion may have "
            f"{needs.num_tokens} here, and one more must fit. Start it with --max-model-len {needed} or "
            "more (--context-length for SGLang's own command)"
        )
    return problems


def _vocabulary_problems(facts: ServerFacts, needs: TeacherNeeds) -> list[str]:
    path = needs.model_path or facts.model_path
    if path is None or not (Path(path) / "tokenizer.json").is_file():
        return [
            "its tokenizer must be compared with that of the trained model, but there is no "
            f"tokenizer.json in the directory that it names, {path}, on this machine. Set "
            "teacher.model_path to a directory with the teacher's tokenizer.json, or to its name on "
            "the Hub"
        ]
    theirs = TextCodec(path, ()).vocabulary()
    different = [(token, i) for token, i in needs.vocabulary.items() if theirs.get(token) != i]
    if not different:
        return []
    token, token_id = min(different, key=lambda entry: entry[1])
    return [
        f"each token of the trained model must be the same token of the teacher, but "
        f"{len(different)} of {len(needs.vocabulary)} are not in {path}/tokenizer.json: token "
        f"{token_id} is {token!r}, which the teacher has as {theirs.get(token)}. Choose a teacher with the "
        "same tokenizer"
    ]


def _wrong_teacher(url: str, problems: Sequence[str]) -> WrongServer:
    lines = "\n".join(f"  - {problem}." for problem in problems)
    return WrongServer(
        f"The server {url} (teacher.urls) cannot be the teacher of this run:\n{lines}"
    )
