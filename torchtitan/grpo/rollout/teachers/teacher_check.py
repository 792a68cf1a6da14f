# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides whether a server can be the teacher of a run.

A teacher rates token ids, so that each id must mean the same to both models. And it must stay the
same model: it is asked for fixed tokens at the start, and again whenever it comes back after it was
lost.
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

_PROBE_LENGTH = 32
# Kernels of one server round differently from call to call, far less than models differ.
_SAME_MODEL_NATS = 0.1


@dataclass(frozen=True)
class TeacherNeeds:
    """What a run needs of each of its teachers.

    Attributes:
        vocabulary: The tokens of the trained model, with their ids.
        vocab_size: Vocabulary size of the trained model.
        num_tokens: Longest prompt and completion together.
        model_path: ``teacher.model_path``; None takes the directory that the server names.
    """

    vocabulary: Mapping[str, int]
    vocab_size: int
    num_tokens: int
    model_path: str | None

    def probe(self) -> list[int]:
        """Returns the fixed tokens by which a teacher is recognised."""
        generator = random.Random(20)
        length = max(2, min(_PROBE_LENGTH, self.num_tokens))
        return [generator.randrange(self.vocab_size) for _ in range(length)]


async def check_teacher(client: InferenceClient, needs: TeacherNeeds) -> list[float]:
    """Checks a server that is up; returns its logprobs of the probe tokens.

    Raises:
        WrongServer: If it cannot be a teacher of this run.
        RouteError: If it does not answer, or fails.
    """
    try:
        facts = await client.describe(1.0)
        # In a thread: a large vocabulary takes about a second, in which no rollout would go on.
        problems = await asyncio.to_thread(_vocabulary_problems, facts, needs)
        problems = [*_size_problems(facts, needs), *problems]
        if not problems:
            return await client.prompt_logprobs(needs.probe())
    except RouteError as error:
        if not error.is_refusal:
            raise
        problems = [str(error)]
    except ServerError as error:
        problems = [str(error)]
    raise _wrong_teacher(client.url, problems)


def check_same_model(url: str, first: Sequence[float], now: Sequence[float]) -> None:
    """Checks that a teacher rates the probe tokens as at the start.

    Raises:
        WrongServer: If it does not.
    """
    difference = sum(abs(a - b) for a, b in zip(first, now, strict=True)) / len(first)
    if not difference <= _SAME_MODEL_NATS:
        raise _wrong_teacher(
            url,
            [
                "all teachers must serve the model that the run began with, but it rates fixed tokens "
                f"otherwise, by {difference:.3g} nats on average (at most {_SAME_MODEL_NATS:g}). Serve "
                "the same weights there again; a run with another teacher is a new run"
            ],
        )


def _size_problems(facts: ServerFacts, needs: TeacherNeeds) -> list[str]:
    problems = []
    if facts.vocab_size is not None and facts.vocab_size < needs.vocab_size:
        problems.append(
            f"its vocabulary has {facts.vocab_size} tokens, and that of the trained model has "
            f"{needs.vocab_size}, so that it could not rate each of them"
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
    """Returns how the teacher's tokens differ from those of the trained model."""
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
