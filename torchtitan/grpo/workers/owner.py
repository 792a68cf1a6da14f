# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts worker processes, has them load the user's code, counts failed calls, and kills them."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from torchtitan.grpo.config import Workers
from torchtitan.grpo.workers.channel import Refused
from torchtitan.grpo.workers.process import WorkerLost, WorkerProcess

Reply = TypeVar("Reply")

LOAD_FACTOR = 10
"""Loading may take this many times the limit of one call: user code imports large libraries and
reads files, above all in the first seconds of a run, when everything else starts as well."""

OUTPUT_HINT = "Its output is in rollout_process.log."


class CallFailed(Exception):
    """One call of user code failed. Failures with the same cause have the same ``kind``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class FailureLimit:
    """Counts failed calls by kind; too many in a row end the run with ``error``.

    Calls with different ``row`` are counted apart: the success of one says nothing about another.
    ``calls`` says in messages what fails (``groups in a row could not be scored``). ``most`` is the
    limit with its TOML key.
    """

    def __init__(
        self,
        calls: str,
        most: tuple[int, str],
        error: type[RuntimeError],
        on_failure: Callable[[CallFailed], object],
    ) -> None:
        self._calls, self._most, self._error, self._on_failure = calls, most, error, on_failure
        self._failures_in_a_row: Counter[Hashable] = Counter()
        self.failures: Counter[str] = Counter()

    def record_failure(
        self, failure: CallFailed, *, row: Hashable = None, is_news: bool = True
    ) -> None:
        """Counts and reports a failed call; raises ``error`` after too many in a row.

        A failure that is not ``is_news``, because another call failed meanwhile, is not counted as in a row.
        """
        self.failures[failure.kind] += 1
        self._on_failure(failure)
        self._failures_in_a_row[row] += is_news
        most, key = self._most
        if is_news and self._failures_in_a_row[row] >= most:
            raise self._error(
                f"{self._failures_in_a_row[row]} {self._calls} ({key} = {most}). The last reason: "
                f"{failure}"
            ) from failure

    def record_success(self, row: Hashable = None) -> None:
        self._failures_in_a_row.pop(row, None)


class WorkerOwner(FailureLimit, Generic[Reply]):
    """Owns the running worker processes of one program, and counts its failed calls.

    ``load`` is the first request to each process, which then loads the user's code; if that fails,
    ``error`` is raised. ``timeout_seconds`` is the time limit of one call with its TOML key. ``subject``
    names in messages what is loaded (``rollout.environment 'calculator'``). See also `FailureLimit`.
    """

    def __init__(
        self,
        module: str,
        decode_reply: Callable[[bytes], Reply | Refused],
        load: Any,
        *,
        subject: str,
        calls: str,
        error: type[RuntimeError],
        timeout_seconds: tuple[float, str],
        most_failures: tuple[int, str],
        workers: Workers,
        on_failure: Callable[[CallFailed], object],
    ) -> None:
        super().__init__(calls, most_failures, error, on_failure)
        self._module, self._decode_reply, self._load_request = module, decode_reply, load
        self.subject, self._timeout, self._workers = subject, timeout_seconds, workers
        self._running: set[WorkerProcess[Reply | Refused]] = set()
        self.is_closed = False

    async def start(
        self, on_end: Callable[[WorkerLost], None] = lambda reason: None
    ) -> tuple[WorkerProcess[Reply | Refused], Reply]:
        """Starts a process that loads the user's code. Returns the process and its reply.

        Raises the owner's ``error`` if the code cannot be loaded in time, and WorkerLost after
        `close`.
        """
        if self.is_closed:
            raise WorkerLost("No worker process is started any more: the run is ending.")

        def ended(reason: WorkerLost) -> None:
            self._running.discard(process)
            on_end(reason)

        process = WorkerProcess(self._module, self._decode_reply, ended, self._workers)
        self._running.add(process)
        try:
            await process.start()
            return process, await self._load(process)
        except BaseException:
            await process.kill()
            raise

    async def close(self) -> None:
        """Kills all processes, and starts no more."""
        self.is_closed = True
        for process in list(self._running):
            await process.kill()

    async def _load(self, process: WorkerProcess[Reply | Refused]) -> Reply:
        limit, key = self._timeout
        try:
            reply = await process.call_or_kill(self._load_request, LOAD_FACTOR * limit)
        except TimeoutError as error:
            raise self._error(
                f"Importing {self.subject} took longer than {LOAD_FACTOR * limit:g} s, {LOAD_FACTOR} "
                f"times {key}. Import less, or raise {key}."
            ) from error
        except WorkerLost as error:
            if self.is_closed:
                raise
            raise self._error(
                f"Importing {self.subject} ended the worker process: {error} {OUTPUT_HINT}"
            ) from error
        if isinstance(reply, Refused):
            raise self._error(reply.message)
        return reply
