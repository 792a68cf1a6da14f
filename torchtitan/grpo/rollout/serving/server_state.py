# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The dispatcher's view of one server, the choice among servers, and a time limit on waiting for one."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from torchtitan.grpo.inference.client import InferenceClient, ServerError, ServerLoad
from torchtitan.grpo.rollout.serving.concurrency import ConcurrencyWindow
from torchtitan.grpo.rollout.serving.speed_fit import SpeedFit
from torchtitan.grpo.system.cause_clock import CauseClock
from torchtitan.grpo.types import Generation

logger = logging.getLogger(__name__)

# Time enough to notice that the server has ended, before completions are sent to it once more.
_FIRST_BACKOFF_SECONDS = 0.5
_LONGEST_BACKOFF_SECONDS = 5.0
# Weight of a new completion's speed in the running mean.
_RATE_GAIN = 0.1
# In doubt, a completion's time is its tokens', and neither the request's nor that of those beside it.
_DOUBTS = (1e-3, 0.0, 1e-3)
# A completion longer than expected is assumed to need this part of its expected length again.
_OVERDUE_PART = 0.25
_LOAD_TIMEOUT_SECONDS = 2.0
SPEED_METRICS = ("request_seconds", "token_seconds", "beside_seconds")
COMPLETIONS_METRIC = "completions_total"


@dataclass(eq=False)
class Job:
    """One completion that a server is generating. ``number`` identifies it in the server's window.

    ``is_cut`` says that the request is ended on purpose, and that the tokens generated so far are kept.
    ``is_held`` says that it only keeps a place, while an environment or an agent works.
    """

    expected_tokens: float
    started_at: float
    number: int | None = None
    group_id: int | None = None
    is_evaluation: bool = False
    is_cut: bool = False
    is_held: bool = False
    job_seconds_before: float = 0.0

    def remaining_tokens(self, now: float, tokens_per_second: float) -> float:
        written = tokens_per_second * (now - self.started_at)
        return max(self.expected_tokens - written, _OVERDUE_PART * self.expected_tokens)


@dataclass(eq=False)
class Server:
    """The dispatcher's record of one server. Times are on the monotonic clock.

    Attributes:
        version: Attested policy version. ``None`` while the server is not READY.
        is_down: Whether the server's process is known to have ended.
        is_lost: Whether the server has left READY and has not been attested since.
        is_silent: Whether the server did not answer when it was asked for its load last.
        is_asleep: Whether the server sleeps, or has woken up but has not been attested since.
        is_cut: Whether the server gets no requests, even if attested, because its devices are needed.
        attested: The last version that was attested. Kept when the server leaves READY.
        num_tokens: Tokens that the server has generated, without those of evaluations.
        tokens_per_second: Mean speed of a single completion beside others. 0 before the first one ends.
        speed: Fit of a completion's seconds: per request, per token, per token times running completions.
        requests: Unanswered requests, including cancelled ones of which the server was not yet notified.
        retry_at: End of the pause after a failure.
    """

    client: InferenceClient
    version: int | None = None
    is_down: bool = False
    is_lost: bool = False
    is_silent: bool = False
    is_asleep: bool = False
    is_cut: bool = False
    attested: int | None = None
    window: ConcurrencyWindow | None = None
    jobs: set[Job] = field(default_factory=set)
    reported: ServerLoad | None = None
    num_tokens: int = 0
    tokens_per_second: float = 0.0
    requests: set[asyncio.Task[Generation]] = field(default_factory=set)
    retry_at: float = 0.0
    last_failure_at: float = 0.0
    failures_in_a_row: int = 0
    samples_unknown_ids: bool = False
    speed: SpeedFit = field(default_factory=lambda: SpeedFit(_DOUBTS))
    clock: CauseClock = field(default_factory=lambda: CauseClock("starting"))
    _seconds: tuple[float, float] = (0.0, 0.0)  # of prefill and decode, when last looked at
    _job_seconds: float = 0.0  # of all jobs up to the last change
    _changed_at: float = 0.0
    _left: asyncio.Future[None] | None = None
    _attested: asyncio.Future[None] | None = None

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def load(self) -> int:
        return len(self.jobs) - self.num_evaluated

    @property
    def num_evaluated(self) -> int:
        return sum(job.is_evaluation for job in self.jobs)

    def is_ready(self) -> bool:
        return self.version is not None and time.monotonic() >= self.retry_at

    @property
    def waits_for_devices(self) -> bool:
        """Whether the server sleeps, or was ended, until the training devices are lent again."""
        return self.is_asleep or self.is_cut

    @property
    def has_failed(self) -> bool:
        """Whether the server is lost, and not merely waiting for the training devices."""
        return self.is_lost and not self.waits_for_devices

    @property
    def state(self) -> str:
        if self.is_ready():
            return "ready"
        return "asleep" if self.is_asleep else "lost" if self.is_lost else "waiting"

    @property
    def activity(self) -> str:
        """What the server's time is counted as."""
        if self.waits_for_devices:
            return "asleep"
        if self.attested is None and not self.is_down:
            return "starting"
        if not self.is_ready() or self.is_silent:
            return "lost"
        return "generating" if any(not job.is_held for job in self.jobs) else "idle"

    def note_activity(self) -> None:
        self.clock.enter(self.activity)

    def take_shares(self) -> dict[str, float]:
        """Returns the share of each activity in the time since the last call. They add up to 1.

        The time in which it generates is divided by what the server reports of its requests.
        """
        self.note_activity()
        if (load := self.reported) is not None:
            before, self._seconds = self._seconds, (load.prefill_seconds, load.decode_seconds)
            prefill, decode = (max(n - b, 0.0) for n, b in zip(self._seconds, before, strict=True))
            self.clock.divide("generating", {"prefill": prefill, "generating": decode})
        seconds = self.clock.take()
        total = sum(seconds.values()) or 1.0
        return {f"{cause}_fraction": part / total for cause, part in seconds.items() if part > 0}

    def free_places(self) -> float:
        """How many more rollouts fit into the window: 0 or less if it is full."""
        return math.inf if self.window is None else self.window.size - self.load

    def remaining_tokens(self) -> float:
        now = time.monotonic()
        return sum(job.remaining_tokens(now, self.tokens_per_second) for job in self.jobs)

    def metrics(self) -> dict[str, float]:
        values = {"inflight_rollouts": float(self.load)}
        if self.attested is not None:
            values["version"] = float(self.attested)
        if self.window is not None:
            values["window"] = float(self.window.size)
        if self.reported is not None:
            values["running"] = float(self.reported.running)
            values["waiting"] = float(self.reported.waiting)
            if self.reported.kv_use is not None:
                values["kv_use"] = self.reported.kv_use
        if (costs := self.speed.costs()) is not None:
            values |= dict(zip(SPEED_METRICS, costs, strict=True))
            values[COMPLETIONS_METRIC] = float(self.speed.number)
        return values

    # -- its work ---------------------------------------------------------------------

    def begin_job(
        self,
        expected_tokens: float,
        group_id: int | None = None,
        *,
        is_evaluation: bool = False,
        is_held: bool = False,
    ) -> Job:
        """Notes the start of a completion. The window counts only those of rollouts."""
        number = None if self.window is None or is_evaluation else self.window.begin()
        now = time.monotonic()
        before = self._count_job_seconds(now)
        job = Job(
            expected_tokens,
            now,
            number,
            group_id,
            is_evaluation,
            is_held=is_held,
            job_seconds_before=before,
        )
        self.jobs.add(job)
        self.note_activity()
        return job

    def end_job(self, job: Job, num_tokens: int | None = None) -> None:
        """Notes the end of a completion. ``num_tokens`` is its length, or None if it failed."""
        if num_tokens is not None:
            self.is_silent = False
            if self.window is not None and job.number is not None:
                self.window.succeed(job.number, self.load)
            now = time.monotonic()
            seconds = max(now - job.started_at, 1e-6)
            running = (self._count_job_seconds(now) - job.job_seconds_before) / seconds
            self.speed.add((1.0, num_tokens, num_tokens * running), seconds)
            speed = num_tokens / seconds
            gain = _RATE_GAIN if self.tokens_per_second else 1.0
            self.tokens_per_second += gain * (speed - self.tokens_per_second)
        self._count_job_seconds(time.monotonic())
        self.jobs.discard(job)
        self.note_activity()

    def _count_job_seconds(self, now: float) -> float:
        self._job_seconds += len(self.jobs) * (now - self._changed_at)
        self._changed_at = now
        return self._job_seconds

    def start_request(self, request: asyncio.Task[Generation]) -> None:
        self.requests.add(request)
        request.add_done_callback(self._end_request)

    def _end_request(self, request: asyncio.Task[Generation]) -> None:
        self.requests.discard(request)
        if not request.cancelled():
            request.exception()  # marks the exception as retrieved, in case no task awaits it

    # -- its state --------------------------------------------------------------------

    def left(self) -> asyncio.Future[None]:
        """Returns a future that is done once the server leaves READY."""
        if self._left is None:
            self._left = asyncio.get_running_loop().create_future()
        return self._left

    def attest(self, version: int, pause_seconds: float = 0.0) -> None:
        """Notes that a version is served now, for which generation was paused."""
        self.version = self.attested = version
        self.is_lost = self.is_asleep = self.is_silent = False
        self.retry_at = 0.0
        left = self.clock.move(pause_seconds, "generating", "paused")
        self.clock.move(left, "idle", "paused")
        self.note_activity()
        former, self._attested = self._attested, None
        if former is not None:
            former.set_result(None)

    def next_attestation(self) -> asyncio.Future[None]:
        """Returns a future that is done the next time a version is attested."""
        if self._attested is None:
            self._attested = asyncio.get_running_loop().create_future()
        return self._attested

    def cut(self) -> None:
        """Leaves READY, but cancels no requests, because they are about to be answered."""
        self.version = None
        for job in self.jobs:
            job.is_cut = True
        self.note_activity()

    def leave(self) -> None:
        """Leaves READY, cancels the requests, and completes :meth:`left` at once.

        A cancelled request itself ends only when the server has answered its cancellation.
        """
        self.version = None
        self.is_lost = True
        self.note_activity()
        left, self._left = self._left, None
        if left is not None:
            left.set_result(None)
        for request in list(self.requests):
            request.cancel()

    async def ask_load(self) -> None:
        """Asks the server for its load. Without an answer in time, the load counts as unknown."""
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_SECONDS):
                load = await self.client.load()
        except (ServerError, TimeoutError) as error:
            was_silent = self.is_silent
            self.is_silent = isinstance(error, TimeoutError) or not error.was_answered
            if self.reported is not None or (self.is_silent and not was_silent):
                reason = str(error) or f"no answer within {_LOAD_TIMEOUT_SECONDS:.0f} s"
                logger.info("The load of %s is unknown: %s", self.url, reason)
            load = None
        else:
            self.is_silent = False
        self.note_activity()
        self.report(load)

    def report(self, load: ServerLoad | None) -> None:
        self.reported = load
        if load is not None:
            # Waiting completions of an evaluation must not hold back rollouts.
            load = replace(load, waiting=max(0, load.waiting - self.num_evaluated))
        if self.window is not None:
            self.window.report(load, self.load)

    def fail(self, job: Job, *, is_news: bool) -> None:
        """Notes a failure. If it ``is_news``, pauses the server, longer after each failure in a row."""
        if self.window is not None and job.number is not None:
            self.window.fail(job.number)
        if not is_news:
            return
        now = time.monotonic()
        self.last_failure_at = now
        backoff = _FIRST_BACKOFF_SECONDS * 2 ** min(self.failures_in_a_row, 16)
        self.retry_at = now + min(backoff, _LONGEST_BACKOFF_SECONDS)
        self.failures_in_a_row += 1


class Patience:
    """A time limit on waiting for a server. Its clock stops while all servers that could become ready sleep.

    Servers that use the training devices sleep during training, however long that takes.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock, self._looked_at = seconds, clock, clock()

    def has_ended(self, servers: Iterable[Server]) -> bool:
        """Whether the time is over. Call this often: ``servers`` count as unchanged since the last call."""
        now = self._clock()
        awaited = [s for s in servers if s.waits_for_devices or not s.is_down]
        if not awaited or any(not server.waits_for_devices for server in awaited):
            self._left -= now - self._looked_at
        self._looked_at = now
        return self._left < 0


class HasLoad(Protocol):
    """What `best_server` needs to know about a server."""

    @property
    def load(self) -> int: ...

    def free_places(self) -> float: ...

    def remaining_tokens(self) -> float: ...


_Server = TypeVar("_Server", bound=HasLoad)


def best_server(
    servers: Iterable[_Server],
    *,
    num_completions: int = 1,
    prefer: _Server | None = None,
    has_begun: bool = False,
) -> _Server | None:
    """Returns the server that gets the completions, or ``None`` if no server may take them.

    Of the servers with room in their window, this chooses the one with the fewest expected remaining
    tokens. The number of completions would be a worse measure, because some are long; see StreamRL
    (2025, https://arxiv.org/abs/2504.15930). Prompt tokens, computed once per group, do not count.

    All ``num_completions`` go to one server: if none has room for all of them, the one with the most
    room is chosen. ``prefer`` is a server that has the prefix in its cache. It is chosen if it has
    room. With ``has_begun``, these completions or others of their group were begun before. They do
    not wait for room: if no server has any, the least busy one gets them.
    """
    candidates = list(servers)
    with_room = [server for server in candidates if server.free_places() > 0]
    if prefer in with_room:
        return prefer
    if not with_room and not has_begun:
        return None
    whole = [server for server in with_room if server.free_places() >= num_completions]
    if with_room and not whole:
        return max(with_room, key=lambda server: server.free_places())
    return min(whole or candidates, key=lambda s: (s.remaining_tokens(), s.load), default=None)
