# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sends rollouts to teachers, which may be slow, lost, or restarted.

The state of a teacher::

    ready --a request fails--> paused --the pause ends--> ready
      ^                          |
      |                          | the pause ends, and the failed request had got no answer
      |                          v
      +-------------------------lost
        it rates the probe tokens as at the start

A teacher that was idle for a while must also rate the probe tokens before its next request. Without
requests that fail, a restart with other weights would have gone unnoticed.

Pauses grow with each failure in a row. A failed rating is requested again, from any teacher that
is ready. A group is closed as unrated once no teacher has answered anything for
``teacher.wait_seconds``, or if one of its ratings fails again and again while others succeed.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from torchtitan.grpo.config import Teacher
from torchtitan.grpo.inference.client import InferenceClient, ServerError
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.inference.join_check import WrongServer
from torchtitan.grpo.inference.waiting import Show, wait_until_up
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.serving.server_state import Server
from torchtitan.grpo.rollout.teachers.teacher_check import (
    TeacherNeeds,
    TeacherProbe,
    check_same_model,
    check_teacher,
    rate_probe,
)
from torchtitan.grpo.types import Rollout, TopTokens

logger = logging.getLogger(__name__)

_MOST_OWN_FAILURES = 20
MAX_UNRATED_GROUPS = 16
# A request that is refused will hardly be answered later; one that failed may be.
_REFUSAL_COUNT = 4
_LONGEST_POLL_SECONDS = 0.5
_SHORTEST_POLL_SECONDS = 0.02
_CLOSE_SECONDS = 0.5
# No server starts within this time.
_IDLE_SECONDS = 2.0
# Sending a short rollout costs more than rating it, so short rollouts share a request. Long ones gain
# nothing from that, and the request would last as long as all of them together.
_REQUEST_TOKENS = 4096

Rating = tuple[np.ndarray, TopTokens | None]
"""[completion_len] float32 logprobs of completion tokens under the teacher, and with ``teacher.top_k``
the teacher's most likely tokens in their places."""

Pair = tuple[np.ndarray, np.ndarray]
"""Token ids of a prompt and of its completion."""


class NotRated(RuntimeError):
    """A rollout got no rating."""


class Unrated(RuntimeError):
    """A group cannot be trained on, because a rollout of it got no rating."""


class TeachersFailing(RuntimeError):
    """Too many groups in a row got no rating. The run must stop."""


def student_tokens(top: TopTokens, top_k: int, vocab_size: int, url: str) -> TopTokens:
    """Returns the ``top_k`` most likely tokens of the student's vocabulary, the most likely one first.

    The student cannot write a teacher's further tokens, often unused rows of its embeddings. They count
    as "any other token". Raises :class:`ServerError` if too few tokens are left at a position.
    """
    logprobs = np.where(top.ids < vocab_size, top.logprobs, -np.inf)
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :top_k]
    kept = np.take_along_axis(logprobs, order, axis=1)
    if kept.shape[1] < top_k or np.isneginf(kept).any():
        raise ServerError(
            f"{url}: the teacher must name {top_k} of the {vocab_size} tokens of the trained model at each "
            f"place (teacher.top_k), but the most likely ones that it named there are fewer."
        )
    return TopTokens(np.take_along_axis(top.ids, order, axis=1), kept)


@dataclass
class _Patience:
    """Counts the failures of one rating during which others succeed. Refusals always count, and count more."""

    num_answered: int
    own_failures: int = 0

    def note(self, error: ServerError, num_answered: int) -> None:
        """Counts a failure, and raises NotRated if there were too many."""
        if isinstance(error, RouteError) and error.is_refusal:
            self.own_failures += _REFUSAL_COUNT
        elif num_answered > self.num_answered:
            self.own_failures += 1
        self.num_answered = num_answered
        if self.own_failures >= _MOST_OWN_FAILURES:
            raise NotRated(f"Its rating failed again and again, and others did not. {error}")


class TeacherPool:
    """Has teachers rate groups. ``num_waiting`` rollouts in ``num_waiting_groups`` groups wait for ratings."""

    def __init__(
        self,
        clients: Sequence[InferenceClient],
        settings: Teacher,
        needs: TeacherNeeds,
        *,
        drops: DropLog | None = None,
    ) -> None:
        assert clients, "a pool has a teacher"
        self._teachers = [Server(client, version=0) for client in clients]
        self._settings, self._needs = settings, needs
        self._drops = drops or DropLog()
        self._places = asyncio.Semaphore(settings.max_concurrent_requests * len(clients))
        self._checking = asyncio.Lock()
        self._in_question: Server | None = None  # is being asked for the probe tokens
        self._probe: TeacherProbe | None = None
        self._last_answer_at = 0.0
        self._confirmed_at: dict[str, float] = {}  # when each teacher last was what it should be
        self._num_answered = 0
        self._seconds: list[float] = []  # of each rating since the last metrics
        self._unrated_in_a_row = 0
        self._last_error = ""
        self.num_waiting = self.num_waiting_groups = 0

    async def start(self, timeout_seconds: float, show: Show | None = None) -> None:
        """Waits until all teachers are up and checked. ``show`` is called meanwhile.

        Raises WrongServer for an unsuitable teacher, and TimeoutError if one is not up in time.
        """
        await wait_until_up(
            [teacher.client for teacher in self._teachers],
            [],
            timeout_seconds,
            check=self._check,
            show=show,
            kind="teacher",
            urls_key="teacher.urls",
        )

    async def rate_group(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the rollouts of a group with the teacher's ratings.

        Raises Unrated if a rollout got no rating, and TeachersFailing for the last of
        `MAX_UNRATED_GROUPS` such groups in a row.
        """
        failed: NotRated | None = None
        pairs = [(rollout.prompt_ids, rollout.token_ids) for rollout in rollouts]
        takes_lists = all(t.client.capabilities.rates_lists for t in self._teachers)
        most_tokens = _REQUEST_TOKENS if takes_lists else 0
        ratings: list[asyncio.Task[list[Rating]]] = []
        self.num_waiting_groups += 1
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in request_parts([len(p) + len(c) for p, c in pairs], most_tokens):
                    ratings.append(tasks.create_task(self.rate(pairs[part])))
        except* NotRated as errors:
            failed = next(error for error in errors.exceptions if isinstance(error, NotRated))
        finally:
            self.num_waiting_groups -= 1
        if failed is not None:
            raise self._count(failed) from failed
        self._unrated_in_a_row = 0
        found = [rating for part in ratings for rating in part.result()]
        return [
            replace(
                rollout,
                teacher_logprobs=logprobs,
                teacher_top_ids=None if top is None else top.ids,
                teacher_top_logprobs=None if top is None else top.logprobs,
            )
            for rollout, (logprobs, top) in zip(rollouts, found, strict=True)
        ]

    def describe(self) -> str:
        if self.num_waiting_groups == 0:
            return ""
        text = f"{self.num_waiting_groups} groups wait for a teacher"
        return f"{text}, whose last error was: {self._last_error}" if self._last_error else text

    def _count(self, failed: NotRated) -> RuntimeError:
        self._unrated_in_a_row += 1
        if self._unrated_in_a_row < MAX_UNRATED_GROUPS:
            return Unrated(str(failed))
        return TeachersFailing(f"{self._unrated_in_a_row} groups in a row got no rating. {failed}")

    async def rate(self, pairs: Sequence[Pair]) -> list[Rating]:
        """Has a teacher rate several rollouts in one request, or raises :class:`NotRated`."""
        sequences = [[*prompt.tolist(), *completion.tolist()] for prompt, completion in pairs]
        self.num_waiting += len(pairs)
        begin = time.monotonic()
        try:
            async with self._places:
                found = await self._rate(sequences, [len(prompt) for prompt, _ in pairs])
        finally:
            self.num_waiting -= len(pairs)
        self._seconds.append(time.monotonic() - begin)
        return found

    def take_metrics(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, []
        mean = {"teacher/rating_seconds": sum(seconds) / len(seconds)} if seconds else {}
        return mean | {"teacher/waiting_rollouts": float(self.num_waiting)}

    async def close(self) -> None:
        closing = [asyncio.create_task(teacher.client.close()) for teacher in self._teachers]
        await asyncio.wait(closing, timeout=_CLOSE_SECONDS)

    async def _rate(self, sequences: list[list[int]], starts: list[int]) -> list[Rating]:
        patience = _Patience(self._num_answered)
        asked_at = time.monotonic()
        while True:
            teacher = await self._ready_teacher(asked_at)
            job = teacher.begin_job(sum(map(len, sequences)))
            try:
                ratings = await self._ask(teacher.client, sequences, starts)
            except ServerError as error:
                is_news = job.started_at >= teacher.last_failure_at
                teacher.fail(job, is_news=is_news)
                self._note_failure(teacher, error)
                patience.note(error, self._num_answered)
                continue
            finally:
                teacher.end_job(job)
            teacher.failures_in_a_row = 0
            self._num_answered += 1
            self._last_answer_at = self._confirmed_at[teacher.url] = time.monotonic()
            return ratings

    async def _ask(
        self, client: InferenceClient, sequences: list[list[int]], starts: list[int]
    ) -> list[Rating]:
        assert self._probe is not None, "teachers are checked before they are asked"
        found = await client.rate(sequences, starts, self._probe.num_top)
        top_k, vocab_size = self._settings.top_k, self._needs.vocab_size
        return [
            (
                np.array(rating.logprobs, np.float32),
                None
                if rating.top is None
                else student_tokens(rating.top, top_k, vocab_size, client.url),
            )
            for rating in found
        ]

    async def _ready_teacher(self, asked_at: float) -> Server:
        """Waits until a teacher has room for a request, and returns the one with the most room.

        Raises NotRated if no teacher has answered for ``teacher.wait_seconds`` since ``asked_at``.
        """
        most = self._settings.max_concurrent_requests
        while True:
            ready = [t for t in self._teachers if t.is_ready() and t.load < most]
            for teacher in sorted(ready, key=lambda t: (t.is_lost, t.load)):
                if not (teacher.is_lost or self._is_idle(teacher)):
                    return teacher
                # One request asks, and the others go on looking.
                if not self._checking.locked() and await self._is_recognized(teacher):
                    return teacher
            silent = time.monotonic() - max(self._last_answer_at, asked_at)
            if silent > self._settings.wait_seconds:
                raise NotRated(
                    f"No teacher has answered for {silent:.0f} s (teacher.wait_seconds = "
                    f"{self._settings.wait_seconds:g}). {self._last_error}"
                )
            pause = min(teacher.retry_at for teacher in self._teachers) - time.monotonic()
            await asyncio.sleep(min(max(pause, _SHORTEST_POLL_SECONDS), _LONGEST_POLL_SECONDS))

    def _is_idle(self, teacher: Server) -> bool:
        """Whether a teacher has been idle for so long that it may have been restarted unnoticed."""
        silent = time.monotonic() - self._confirmed_at[teacher.url]
        is_asked = bool(teacher.jobs) and teacher is not self._in_question
        return silent > _IDLE_SECONDS and not is_asked

    async def _is_recognized(self, teacher: Server) -> bool:
        """Checks a teacher that was lost or idle. Returns whether it answers and is still the same model."""
        async with self._checking:
            job, self._in_question = teacher.begin_job(0), teacher
            try:
                if teacher.is_lost:
                    await self._check(teacher.client)
                else:
                    await self._recognize(teacher.client)
            except ServerError as error:
                teacher.fail(job, is_news=True)
                self._note_failure(teacher, error)
                return False
            finally:
                self._in_question = None
                teacher.end_job(job)
            if teacher.is_lost:
                logger.info("The teacher %s is back.", teacher.url)
            teacher.is_lost, teacher.failures_in_a_row = False, 0
            return True

    async def _recognize(self, client: InferenceClient) -> None:
        assert self._probe is not None, "teachers are checked before they are asked"
        now = await rate_probe(client, self._needs, self._probe.num_top)
        check_same_model(client.url, self._probe, now)
        self._confirmed_at[client.url] = time.monotonic()

    async def _check(self, client: InferenceClient) -> None:
        probe = await check_teacher(client, self._needs)
        if self._probe is None:
            self._probe = probe
        check_same_model(client.url, self._probe, probe)
        self._confirmed_at[client.url] = time.monotonic()

    def _note_failure(self, teacher: Server, error: ServerError) -> None:
        self._last_error = str(error)
        self._drops.record("rating failed", str(error), source=teacher.url)
        if isinstance(error, WrongServer) or not error.was_answered:
            teacher.is_lost = True


def request_parts(lengths: Sequence[int], most_tokens: int) -> list[slice]:
    """Splits rollouts of these lengths, in order, into requests of at most ``most_tokens`` each.

    ``request_parts([3, 4, 5, 2], 8)`` is ``[0:2, 2:4]``. A rollout that is longer gets its own request.
    """
    begins: list[int] = []
    total = 0
    for i, length in enumerate(lengths):
        total += length
        if not begins or total > most_tokens:
            begins.append(i)
            total = length
    return [slice(a, b) for a, b in pairwise([*begins, len(lengths)])]
