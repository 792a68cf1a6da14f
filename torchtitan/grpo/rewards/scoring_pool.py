# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Scoring in worker processes that can be killed.

A reward function is the user's code: it may hang, crash, print or leak. It therefore
runs in a process of its own, whose whole session is killed at the time limit; the group
is then unscored, and a fresh worker takes the place.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from torchtitan.grpo.rewards.scoring_messages import (
    LENGTH,
    Load,
    Refused,
    Reply,
    Request,
    Score,
    Scored,
    Values,
    decode_reply,
    frame,
)
from torchtitan.grpo.system.child import die_with_parent
from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.types import Prompt

logger = logging.getLogger(__name__)

# What reward functions import may take longer than a group, above all right at the start.
_LOAD_FACTOR = 10


class ScoringFailed(Exception):
    """One group could not be scored. ``kind`` is the same for the same cause."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RewardError(RuntimeError):
    """Scoring is broken, not just for one group: the run must stop."""


class RewardPool:
    """Workers that score, one group at a time each.

    Args:
        functions: Names as in ``reward.functions``.
        num_workers: ``reward.num_workers``.
        timeout_seconds: ``reward.timeout_seconds``, for one group, and for importing the
            functions.
        max_consecutive_failures: ``reward.max_consecutive_failures``.
    """

    def __init__(
        self,
        functions: Sequence[str],
        *,
        num_workers: int,
        timeout_seconds: float,
        max_consecutive_failures: int,
    ) -> None:
        self.functions = list(functions)
        self._num_workers = num_workers
        self._timeout = timeout_seconds
        self._max_consecutive_failures = max_consecutive_failures
        self._consecutive_failures = 0
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        self.failures: Counter[str] = Counter()

    async def start(self) -> None:
        """Starts the workers and imports the functions in each.

        Raises:
            RewardError: A function cannot be imported within ten times
                ``reward.timeout_seconds``.
        """
        first = _Worker(self)
        self._idle.put_nowait(first)
        # One after the first: a path that does not import is then reported once.
        await first.start()
        for _ in range(self._num_workers - 1):
            self._idle.put_nowait(_Worker(self))

    async def check(
        self,
        prompt: Prompt,
        which: Sequence[int] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Calls every function once, on ``prompt`` and an empty completion.

        Raises:
            RewardError: One fails, hangs, or returns what cannot be trained on.
        """
        try:
            await self._score(prompt, [""], [[]], which, columns)
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
    ) -> list[Values]:
        """Scores the completions of one prompt.

        Args:
            prompt: Its text and columns are handed to the functions.
            completions: Decoded texts.
            completion_ids: Their token ids.
            which: Positions of the functions to call; None is all.
            columns: Further arguments, one value a completion.

        Returns:
            For each function, one value a completion.

        Raises:
            ScoringFailed: This group cannot be scored.
            RewardError: ``reward.max_consecutive_failures`` groups in a row could not.
        """
        try:
            values = await self._score(prompt, completions, completion_ids, which, columns)
        except ScoringFailed as error:
            self._record(error)
            raise
        self._consecutive_failures = 0
        return values

    async def close(self) -> None:
        """Kills the workers. Idempotent."""
        workers, self._workers = list(self._workers), set()
        for worker in workers:
            await worker.kill()

    async def _score(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        which: Sequence[int] | None,
        columns: Mapping[str, Sequence[Any]] | None,
    ) -> list[Values]:
        positions = list(which if which is not None else range(len(self.functions)))
        request = _score_request(prompt, completions, completion_ids, positions)
        request.columns |= {name: list(values) for name, values in (columns or {}).items()}
        worker = await self._idle.get()
        try:
            reply = await worker.ask(request)
        except TimeoutError as error:
            names = ", ".join(self.functions[i] for i in positions)
            raise ScoringFailed(
                "timeout",
                f"Scoring one group with {names} took longer than reward.timeout_seconds = "
                f"{self._timeout:g}; its worker was killed.",
            ) from error
        finally:
            self._idle.put_nowait(worker)
        if isinstance(reply, Scored):
            return reply.values
        assert isinstance(reply, Refused), f"unexpected reply {reply!r}"
        raise ScoringFailed(reply.kind, reply.message)

    def _record(self, error: ScoringFailed) -> None:
        self.failures[error.kind] += 1
        if self.failures[error.kind] == 1:
            logger.warning("A group is unscored (said once for each kind of failure): %s", error)
        self._consecutive_failures += 1
        if self._consecutive_failures >= self._max_consecutive_failures:
            raise RewardError(
                f"{self._consecutive_failures} groups in a row could not be scored "
                f"(reward.max_consecutive_failures = {self._max_consecutive_failures}). "
                f"The last reason: {error}"
            ) from error


class _Worker:
    """One process, started when it is first needed and again after it was killed."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the process and imports the functions. Raises RewardError."""
        pool = self._pool
        self._process = await asyncio.create_subprocess_exec(
            *LIGHT_PYTHON,
            "torchtitan.grpo.rewards.scoring_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        pool._workers.add(self)
        seconds = _LOAD_FACTOR * pool._timeout
        try:
            reply = await self._exchange(Load(pool.functions), seconds)
        except TimeoutError as error:
            raise RewardError(
                f"Importing the reward functions {', '.join(pool.functions)} took longer than "
                f"{seconds:g} s, {_LOAD_FACTOR} times reward.timeout_seconds."
            ) from error
        except ScoringFailed as error:
            raise RewardError(
                f"Importing the reward functions {', '.join(pool.functions)} ended the worker: "
                f"{error}"
            ) from error
        if isinstance(reply, Refused):
            await self.kill()
            raise RewardError(reply.message)

    async def ask(self, request: Request) -> Reply:
        """Sends one request; kills the process when it does not answer in time."""
        if self._process is None:
            await self.start()
        return await self._exchange(request, self._pool._timeout)

    async def kill(self) -> None:
        """Kills the process and whatever it started in its session."""
        process, self._process = self._process, None
        self._pool._workers.discard(self)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _exchange(self, request: Request, timeout_seconds: float) -> Reply:
        try:
            framed = frame(request)
        except (TypeError, ValueError) as error:
            raise ScoringFailed(
                "column",
                f"A prompt's columns cannot be handed to the reward functions: {error}. "
                "They may hold plain data only: text, numbers, lists, dictionaries.",
            ) from error
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._send_and_receive(framed)
        except BaseException:
            # Also when cancelled: an answer that comes later would be taken for the next one.
            await self.kill()
            raise

    async def _send_and_receive(self, framed: bytes) -> Reply:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(framed)
            await process.stdin.drain()
            header = await process.stdout.readexactly(LENGTH.size)
            return decode_reply(await process.stdout.readexactly(LENGTH.unpack(header)[0]))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            code = await process.wait()
            raise ScoringFailed(
                "crash",
                f"A reward worker ended with exit code {code} while it scored. Its output is in "
                "rollout_process.log.",
            ) from error
        except msgspec.DecodeError as error:
            raise ScoringFailed(
                "channel",
                "A reward worker's answer cannot be read: a reward function wrote to a file "
                f"descriptor that is not its own, or closed it ({error}). It was killed.",
            ) from error


def _score_request(
    prompt: Prompt,
    completions: Sequence[str],
    completion_ids: Sequence[list[int]],
    positions: list[int],
) -> Score:
    count = len(completions)
    texts: list[Any] = list(completions)
    if not isinstance(prompt.text, str):
        texts = [[{"role": "assistant", "content": text}] for text in completions]
    return Score(
        which=positions,
        prompts=[prompt.text] * count,
        completions=texts,
        completion_ids=list(completion_ids),
        columns={name: [value] * count for name, value in prompt.columns.items()},
    )
