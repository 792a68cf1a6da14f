# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""One server, as dispatch sees it."""

import asyncio
import math
import time
from dataclasses import dataclass, field

from torchtitan.grpo.inference.client import InferenceClient, ServerLoad
from torchtitan.grpo.rollout.serving.concurrency import ConcurrencyWindow
from torchtitan.grpo.types import Generation

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 5.0
# Of the difference between a completion's speed and the mean so far.
_RATE_GAIN = 0.1
# A completion that is longer than expected will probably write this part of that again.
_OVERDUE_PART = 0.25


@dataclass(eq=False)
class Job:
    """A completion's place on one server.

    Attributes:
        expected_tokens: How long it will probably be.
        started_at: On the monotonic clock.
        number: By which the server's window knows it; None without a window.
        group_id: Whose completion it is, where that is of interest.
    """

    expected_tokens: float
    started_at: float
    number: int | None = None
    group_id: int | None = None

    def remaining_tokens(self, now: float, tokens_per_second: float) -> float:
        """Tokens still to be written, if it is written at that speed."""
        written = tokens_per_second * (now - self.started_at)
        return max(self.expected_tokens - written, _OVERDUE_PART * self.expected_tokens)


@dataclass(eq=False)
class Server:
    """One server, as dispatch sees it.

    Attributes:
        client: For generation.
        version: What it serves, attested; None while it is not READY.
        is_down: Its process is known to have ended.
        is_lost: It has left READY and was not attested since.
        window: Bounds the completions in flight on it; None where nothing does.
        jobs: Completions in flight on it.
        reported: What it last said of its own load; None where that is not known.
        tokens_per_second: Of one completion among others, averaged; 0 before the first.
        requests: Until the server has answered, or was told that nobody waits any more.
    """

    client: InferenceClient
    version: int | None = None
    is_down: bool = False
    is_lost: bool = False
    window: ConcurrencyWindow | None = None
    jobs: set[Job] = field(default_factory=set)
    reported: ServerLoad | None = None
    tokens_per_second: float = 0.0
    requests: set[asyncio.Task[Generation]] = field(default_factory=set)
    retry_at: float = 0.0
    last_failure_at: float = 0.0
    failures_in_a_row: int = 0
    _left: asyncio.Future[None] | None = None
    _attested: asyncio.Future[None] | None = None

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def load(self) -> int:
        """Completions in flight on it."""
        return len(self.jobs)

    def is_ready(self) -> bool:
        """Attested, and not in the pause after a failure."""
        return self.version is not None and time.monotonic() >= self.retry_at

    def free_places(self) -> float:
        """Completions that still go into its window; none and fewer where it is full."""
        return math.inf if self.window is None else self.window.size - self.load

    def remaining_tokens(self) -> float:
        """What all completions in flight on it will probably still write."""
        now = time.monotonic()
        return sum(job.remaining_tokens(now, self.tokens_per_second) for job in self.jobs)

    def metrics(self) -> dict[str, float]:
        """What it is given, and of its own report what is known."""
        values = {"inflight_rollouts": float(self.load)}
        if self.window is not None:
            values["window"] = float(self.window.size)
        if self.reported is not None:
            values["running"] = float(self.reported.running)
            values["waiting"] = float(self.reported.waiting)
            if self.reported.kv_use is not None:
                values["kv_use"] = self.reported.kv_use
        return values

    # -- its work ---------------------------------------------------------------------

    def begin_job(self, expected_tokens: float, group_id: int | None = None) -> Job:
        """One more completion is in flight on it."""
        number = None if self.window is None else self.window.begin()
        job = Job(expected_tokens, time.monotonic(), number, group_id)
        self.jobs.add(job)
        return job

    def end_job(self, job: Job, num_tokens: int | None = None) -> None:
        """It is in flight no more; ``num_tokens`` were written where it ended well."""
        if num_tokens is not None:
            if self.window is not None and job.number is not None:
                self.window.succeed(job.number, self.load)
            speed = num_tokens / max(time.monotonic() - job.started_at, 1e-6)
            gain = _RATE_GAIN if self.tokens_per_second else 1.0
            self.tokens_per_second += gain * (speed - self.tokens_per_second)
        self.jobs.discard(job)

    def start_request(self, request: asyncio.Task[Generation]) -> None:
        self.requests.add(request)
        request.add_done_callback(self._end_request)

    def _end_request(self, request: asyncio.Task[Generation]) -> None:
        self.requests.discard(request)
        if not request.cancelled():
            request.exception()  # nobody may be waiting for it any more

    # -- its state --------------------------------------------------------------------

    def left(self) -> asyncio.Future[None]:
        """Done once the server leaves READY."""
        if self._left is None:
            self._left = asyncio.get_running_loop().create_future()
        return self._left

    def attest(self, version: int) -> None:
        """It serves ``version``, and is READY."""
        self.version = version
        self.is_lost = False
        self.retry_at = 0.0
        former, self._attested = self._attested, None
        if former is not None:
            former.set_result(None)

    def next_attestation(self) -> asyncio.Future[None]:
        """Done once a further version was attested."""
        if self._attested is None:
            self._attested = asyncio.get_running_loop().create_future()
        return self._attested

    def leave(self) -> None:
        """Leaves READY. Those who wait for a request are told at once: to cancel it takes as
        long as the server takes to answer."""
        self.version = None
        self.is_lost = True
        left, self._left = self._left, None
        if left is not None:
            left.set_result(None)
        for request in list(self.requests):
            request.cancel()

    def report(self, load: ServerLoad | None) -> None:
        """What the server says of its load; None where it is not known."""
        self.reported = load
        if self.window is not None:
            self.window.report(load, self.load)

    def fail(self, job: Job, *, is_news: bool) -> None:
        """A completion failed on it: a pause, longer after each failure in a row.

        Args:
            job: The completion.
            is_news: Sent after the last failure: it is not of the same burst.
        """
        if self.window is not None and job.number is not None:
            self.window.fail(job.number)
        if not is_news:
            return
        now = time.monotonic()
        self.last_failure_at = now
        backoff = _FIRST_BACKOFF_SECONDS * 2 ** min(self.failures_in_a_row, 16)
        self.retry_at = now + min(backoff, _LONGEST_BACKOFF_SECONDS)
        self.failures_in_a_row += 1
