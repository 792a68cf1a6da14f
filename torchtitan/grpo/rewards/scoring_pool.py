# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Scores groups in worker processes that can be killed; see `workers/pool.py`.

A group that exceeds the time limit is unscored (never scored as zero). If a hanging
synchronous function is the cause, its worker is killed with all processes that it started, and replaced.

It is not known which group blocked an event loop or ended a process. All groups that the worker was
scoring are therefore scored again, one at a time, in a separate process. A group fails only there.
"""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan.grpo.config import Reward, Workers
from torchtitan.grpo.rewards.reward_calls import Postponed, Score
from torchtitan.grpo.rewards.scoring_worker import (
    Loaded,
    LoadFunctions,
    Reply,
    Scored,
    decode_reply,
)
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.channel import NotPlainData, Refused, not_passed
from torchtitan.grpo.workers.owner import OUTPUT_HINT, CallFailed, WorkerOwner
from torchtitan.grpo.workers.pool import Worker, WorkerPool
from torchtitan.grpo.workers.process import ChannelBroken, WorkerLost

# Of a group that has to wait. A server that is started again takes minutes to load its model.
_PAUSES_SECONDS = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)
# A judge that answered for others is not away, so a group for which it takes this part of the time
# limit, this often, is given up: a batch waits for it.
_SLOW_PART, _MOST_SLOW_TRIES = 0.5, 2


class ScoringFailed(CallFailed):
    """One group could not be scored."""

    def __init__(self, prompt: Prompt, kind: str, message: str) -> None:
        super().__init__(kind, f"{prompt.row}: {message}" if prompt.row else message)


class ScoringPostponed(ScoringFailed):
    """One group could not be scored now, but may be scored later."""


class RewardError(RuntimeError):
    """The reward functions do not work at all, so the run must stop."""


class RewardPool:
    """Scores groups. ``on_failure`` is called for each group that failed or was postponed.

    In ``trainer_state``, functions receive ``max_steps`` and the value returned by ``next_step``.
    """

    def __init__(
        self,
        functions: Sequence[str],
        reward: Reward,
        *,
        num_workers: int = 1,
        workers: Workers | None = None,
        max_steps: int = 0,
        on_failure: Callable[[CallFailed], object] = lambda failure: None,
    ) -> None:
        self.functions = list(functions)
        self._owner = WorkerOwner(
            "torchtitan.grpo.rewards.scoring_worker",
            decode_reply,
            LoadFunctions(self.functions, reward.concurrency, reward.timeout_seconds, reward.judge),
            subject=f"the reward functions {', '.join(self.functions)}",
            calls="groups in a row could not be scored",
            error=RewardError,
            timeout_seconds=(reward.timeout_seconds, "reward.timeout_seconds"),
            most_failures=(reward.max_consecutive_failures, "reward.max_consecutive_failures"),
            workers=workers or Workers(),
            on_failure=on_failure,
        )
        self.failures = self._owner.failures
        self._max_steps, self._on_failure = max_steps, on_failure
        self._num_waiting, self._why_waiting = 0, ""
        self.next_step: Callable[[], int] = lambda: 0
        self.timeout_seconds = reward.timeout_seconds
        self._workers = WorkerPool(self._owner, num_workers, lambda it: _loaded(it).concurrency)
        self._alone, self._num_alone = WorkerPool(self._owner, 1, lambda it: 1), 0
        self._counter = itertools.count()
        # When the last failure of a row was counted, by the functions that were called.
        self._failed_at: dict[tuple[int, ...], float] = {}
        self._num_scored: Counter[tuple[int, ...]] = Counter()

    async def start(self) -> None:
        """Starts the first worker. Raises :class:`RewardError` if the functions do not load."""
        await self._workers.start()

    @property
    def warning(self) -> str:
        """Why fewer groups are scored at a time than the user may expect; empty if as many are scored."""
        return _loaded(self._workers.loaded).warning

    async def check(
        self,
        prompt: Prompt,
        which: Sequence[int] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[float | None]:
        """Calls functions once, on a prompt and an empty completion; see :meth:`score`.

        Raises :class:`RewardError` if one fails, exceeds the time limit, or returns a useless
        value.
        """
        request = self._request(prompt, [""], [[]], which, columns)
        try:
            return [value for (value,) in (await self._scored(request, prompt)).values]
        except ScoringFailed as error:
            raise RewardError(
                f"{error} (checked before training, on the first prompt and an empty completion)"
            ) from error

    async def score(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        which: Sequence[int] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> Scored:
        """Returns each function's values for the completions of one prompt, and what the functions logged.

        ``which`` are indices of functions (``None``: all). ``columns`` are further arguments with one
        value for each completion. Raises :class:`ScoringFailed` if this group cannot be scored. Raises
        :class:`RewardError` if this happens to ``reward.max_consecutive_failures`` groups in a row with
        the same functions (groups scored at the same time count as one), or if a new worker cannot
        import the functions.
        """
        request = self._request(prompt, completions, completion_ids, which, columns)
        row, begun_at = tuple(request.which), math.inf

        def begin() -> None:
            nonlocal begun_at
            begun_at = time.monotonic()

        try:
            scored = await self._patiently_scored(request, prompt, begin)
        except ScoringFailed as error:
            is_news = begun_at >= self._failed_at.get(row, 0.0)
            if is_news:
                self._failed_at[row] = time.monotonic()
            self._owner.record_failure(error, row=row, is_news=is_news)
            raise
        self._owner.record_success(row)
        self._num_scored[row] += 1
        return scored

    def describe(self) -> str:
        """Describes the groups that wait to be scored again; empty if there are none."""
        if not self._num_waiting:
            return ""
        return f"{self._num_waiting} groups wait to be scored again: {self._why_waiting}"

    async def close(self) -> None:
        await self._owner.close()

    def _request(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        which: Sequence[int] | None,
        columns: Mapping[str, Sequence[Any]] | None,
    ) -> Score:
        texts: list[Any] = list(completions)
        if not isinstance(prompt.text, str):
            texts = [[{"role": "assistant", "content": text}] for text in completions]
        count = len(completions)
        return Score(
            number=next(self._counter),
            which=list(which if which is not None else range(len(self.functions))),
            prompts=[prompt.text] * count,
            completions=texts,
            completion_ids=list(completion_ids),
            columns={name: [value] * count for name, value in prompt.columns.items()}
            | {name: list(values) for name, values in (columns or {}).items()},
            global_step=self.next_step(),
            max_steps=self._max_steps,
            row=prompt.row,
        )

    async def _patiently_scored(
        self, request: Score, prompt: Prompt, on_begin: Callable[[], object]
    ) -> Scored:
        row = tuple(request.which)
        num_before: int | None = None
        num_slow, begun = 0, 0.0

        def begin() -> None:
            nonlocal begun, num_before
            begun = time.monotonic()
            num_before = self._num_scored[row] if num_before is None else num_before
            on_begin()

        for pause in _PAUSES_SECONDS:
            try:
                return await self._scored(request, prompt, begin)
            except ScoringPostponed as error:
                seconds = time.monotonic() - begun
                num_slow += seconds >= _SLOW_PART * self.timeout_seconds
                if num_slow >= _MOST_SLOW_TRIES and self._num_scored[row] > (num_before or 0):
                    raise
                self._on_failure(error)
                self._why_waiting = str(error)
            self._num_waiting += 1
            try:
                await asyncio.sleep(pause)
            finally:
                self._num_waiting -= 1
        return await self._scored(request, prompt, on_begin)

    async def _scored(
        self, request: Score, prompt: Prompt, on_begin: Callable[[], object] = lambda: None
    ) -> Scored:
        reply = await self._answer(request, prompt, on_begin)
        if isinstance(reply, Refused):
            failed = ScoringPostponed if isinstance(reply, Postponed) else ScoringFailed
            raise failed(prompt, reply.kind, reply.message)
        assert isinstance(reply, Scored), f"unexpected reply {reply!r}"
        return reply

    async def _answer(
        self, request: Score, prompt: Prompt, on_begin: Callable[[], object]
    ) -> Reply | Refused:
        try:
            return await self._reply(request, on_begin)
        except TimeoutError as error:
            names = ", ".join(self.functions[i] for i in request.which)
            message = (
                f"Scoring one group with {names} took longer than reward.timeout_seconds = "
                f"{self.timeout_seconds:g}."
            )
            raise ScoringFailed(prompt, "timeout", message) from error
        except NotPlainData as error:
            message = not_passed(prompt, request.columns, "the reward functions", error)
            raise ScoringFailed(prompt, "column", message) from error
        except ChannelBroken as error:
            message = (
                f"{error} A reward function wrote to a file descriptor that it did not open, or "
                "closed one. The worker process was killed."
            )
            raise ScoringFailed(prompt, "channel", message) from error
        except WorkerLost as error:
            message = f"Scoring one group failed: {error} {OUTPUT_HINT}"
            raise ScoringFailed(prompt, "crash", message) from error

    async def _reply(self, request: Score, on_begin: Callable[[], object]) -> Reply | Refused:
        """Sends a request, and sends it again if its worker hung or died while scoring several groups.

        ``on_begin`` is called when a worker has room for the request.
        """
        worker = await self._workers.enter()
        on_begin()
        try:
            return await self._in_time(self._workers, worker, request)
        except (TimeoutError, WorkerLost):
            if not worker.was_shared:
                raise
        finally:
            await self._workers.leave(worker)
        self._num_alone += 1
        worker = None
        try:
            worker = await self._alone.enter()
            return await self._in_time(self._alone, worker, request)
        finally:
            self._num_alone -= 1
            if worker is not None:
                worker.is_retired = worker.is_retired or not self._num_alone
                await self._alone.leave(worker)

    async def _in_time(
        self, workers: WorkerPool[Reply], worker: Worker[Reply], request: Score
    ) -> Reply | Refused:
        async with asyncio.timeout(self.timeout_seconds):
            return await workers.call(worker, request)


def _loaded(reply: Reply | None) -> Loaded:
    assert isinstance(reply, Loaded), f"unexpected reply {reply!r}"
    return reply
