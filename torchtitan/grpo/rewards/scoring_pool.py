# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Scores groups in worker processes that can be killed.

Each worker scores one group at a time. One that exceeds the time limit is killed together with
everything it has started, and replaced. Its group is then unscored (never scored as zero).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan.grpo.config import Reward, Workers
from torchtitan.grpo.rewards.scoring_worker import (
    LoadFunctions,
    Score,
    Scored,
    Values,
    decode_reply,
)
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.channel import NotPlainData, Refused, not_passed
from torchtitan.grpo.workers.owner import OUTPUT_HINT, CallFailed, WorkerOwner
from torchtitan.grpo.workers.process import ChannelBroken, WorkerLost, WorkerProcess

_Process = WorkerProcess[Scored | Refused]


class ScoringFailed(CallFailed):
    """One group could not be scored."""


class RewardError(RuntimeError):
    """The reward functions do not work at all, so the run must stop."""


class RewardPool:
    """Scores groups; ``on_failure`` is called with each group that could not be scored."""

    def __init__(
        self,
        functions: Sequence[str],
        reward: Reward,
        *,
        num_workers: int = 1,
        workers: Workers | None = None,
        on_failure: Callable[[CallFailed], object] = lambda failure: None,
    ) -> None:
        self.functions = list(functions)
        self._num_workers, self._timeout = num_workers, reward.timeout_seconds
        self._owner = WorkerOwner(
            "torchtitan.grpo.rewards.scoring_worker",
            decode_reply,
            LoadFunctions(self.functions),
            subject=f"the reward functions {', '.join(self.functions)}",
            calls="groups in a row could not be scored",
            error=RewardError,
            timeout_seconds=(reward.timeout_seconds, "reward.timeout_seconds"),
            most_failures=(reward.max_consecutive_failures, "reward.max_consecutive_failures"),
            workers=workers or Workers(),
            on_failure=on_failure,
        )
        self.failures = self._owner.failures
        # One entry for each worker without work; None stands for a worker yet to be started.
        self._idle: asyncio.Queue[_Process | None] = asyncio.Queue()

    async def start(self) -> None:
        """Starts the first worker; the others are started when they are first needed."""
        self._idle.put_nowait(await self._start_worker())
        for _ in range(self._num_workers - 1):
            self._idle.put_nowait(None)

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
        try:
            return [value for (value,) in await self._score(prompt, [""], [[]], which, columns)]
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
        """Returns for each function its value for each completion of one prompt.

        ``which`` are positions of functions (``None``: all). ``columns`` are further arguments with
        one value for each completion. Raises :class:`ScoringFailed` if this group cannot be scored,
        and :class:`RewardError` if it is the last of ``reward.max_consecutive_failures`` such
        groups in a row, or a new worker cannot import the functions.
        """
        try:
            values = await self._score(prompt, completions, completion_ids, which, columns)
        except ScoringFailed as error:
            self._owner.record_failure(error)
            raise
        self._owner.record_success()
        return values

    async def close(self) -> None:
        await self._owner.close()

    async def _score(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        which: Sequence[int] | None,
        columns: Mapping[str, Sequence[Any]] | None,
    ) -> list[Values]:
        texts: list[Any] = list(completions)
        if not isinstance(prompt.text, str):
            texts = [[{"role": "assistant", "content": text}] for text in completions]
        count = len(completions)
        request = Score(
            which=list(which if which is not None else range(len(self.functions))),
            prompts=[prompt.text] * count,
            completions=texts,
            completion_ids=list(completion_ids),
            columns={name: [value] * count for name, value in prompt.columns.items()}
            | {name: list(values) for name, values in (columns or {}).items()},
        )
        worker = await self._idle.get()
        try:
            if worker is None or worker.is_lost:
                worker = None  # if starting another one fails, the next group tries again
                worker = await self._start_worker()
            reply = await self._call(worker, request, prompt)
        finally:
            self._idle.put_nowait(worker)
        if isinstance(reply, Refused):
            raise ScoringFailed(reply.kind, reply.message)
        assert isinstance(reply, Scored), f"unexpected reply {reply!r}"
        return reply.values

    async def _start_worker(self) -> _Process:
        try:
            worker, _ = await self._owner.start()
        except WorkerLost as error:
            raise ScoringFailed("crash", str(error)) from error
        return worker

    async def _call(self, worker: _Process, request: Score, prompt: Prompt) -> Scored | Refused:
        try:
            return await worker.call_or_kill(request, self._timeout)
        except TimeoutError as error:
            names = ", ".join(self.functions[i] for i in request.which)
            message = (
                f"Scoring one group with {names} took longer than reward.timeout_seconds = "
                f"{self._timeout:g}; its worker was killed."
            )
            raise ScoringFailed("timeout", message) from error
        except NotPlainData as error:
            message = not_passed(prompt, request.columns, "the reward functions", error)
            raise ScoringFailed("column", message) from error
        except ChannelBroken as error:
            message = (
                f"{error} A reward function wrote to a file descriptor that it did not open, or "
                "closed one. The worker process was killed."
            )
            raise ScoringFailed("channel", message) from error
        except WorkerLost as error:
            message = f"Scoring one group failed: {error} {OUTPUT_HINT}"
            raise ScoringFailed("crash", message) from error
