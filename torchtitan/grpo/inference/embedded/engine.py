# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the engine, one thread that schedules requests, samples tokens and swaps weights.

Each iteration of its loop first carries out the calls that other threads have queued (submit, abort,
pause, swap weights). Prompts to be rated are rated together if they were submitted one after the other.
Then, unless the engine is paused, it computes one step: a token for every running request, and waiting
prompts within the step's token budget (see `prefill.py`). Calls run only between two steps.
Therefore

    - each token is sampled with the weights of a single version;
    - a pause is complete when its future is done;
    - new weights are never combined with keys and values of old ones: a swap sends every request
      that has a row back to the front of the queue, and its tokens are computed again from the
      first, even if only some chunks of its prompt were computed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

import torch

from torchtitan.grpo.inference.answers import UPDATING_LABEL
from torchtitan.grpo.inference.client import ServerLoad
from torchtitan.grpo.inference.embedded.model import ModelRunner
from torchtitan.grpo.inference.embedded.prefill import (
    Prefill,
    PrefillPlan,
    PrefillQueue,
    StepTimes,
    default_step_tokens,
    padded_batches,
)
from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.inference.embedded.sampling import SamplingBatch, sample
from torchtitan.grpo.inference.embedded.step_layout import upload
from torchtitan.grpo.inference.embedded.weights import Residence
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.process_tuning import return_free_memory

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
# Token and position of each row, and how it is sampled.
_Batch = tuple[torch.Tensor, torch.Tensor, SamplingBatch]
_Call = tuple[Callable[[], object], Future, bool]  # the last one: whether it only adds requests


class EngineError(RuntimeError):
    """The engine's thread has ended because of an error or of :meth:`Engine.close`."""


class Engine:
    """Continuous batching over a :class:`ModelRunner`, which only the engine's thread uses.

    Any thread may call the public methods. Most return futures; only :meth:`close` waits for the engine's
    thread. After each step, that thread calls ``report`` with the requests that got a token or have
    finished. ``step_tokens`` bounds the tokens of a step, and so how long running requests wait for prompts.
    It must be more than the number of rows; None is :func:`default_step_tokens`. While no request is
    running, ``max_prefill_tokens`` bounds the prompt tokens of a step instead.
    """

    def __init__(
        self,
        runner: ModelRunner,
        report: Callable[[list[Request]], None] = lambda changed: None,
        *,
        seed: int = 0,
        step_tokens: int | None = None,
        max_prefill_tokens: int = 4096,
    ) -> None:
        self._runner = runner
        self.report = report
        if step_tokens is None:
            step_tokens = default_step_tokens(runner.max_slots, runner.device.type)
        self.step_tokens = step_tokens
        self._queue = PrefillQueue(step_tokens, max_prefill_tokens)
        self._max_prefill_tokens = max_prefill_tokens
        self._to_rate: list[Request] = []
        self._generator = torch.Generator(runner.device)
        self._generator.manual_seed(seed)
        self.version = "default"
        self.is_paused = False
        self.residence = Residence.SERVED
        self.failure: BaseException | None = None
        self.num_tokens = 0
        self.num_steps = 0
        self.num_recomputed = 0
        self.num_swaps = 0
        self._rows: list[Request | None] = []
        self._holes: list[int] = []
        self._changed: list[Request] = []
        # Tensors of the current rows, rebuilt when the rows have changed.
        self._batch: _Batch | None = None
        self._calls: deque[_Call] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._times, self._paused_at = StepTimes(), 0.0
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)

    # -- called from any thread -------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_seconds: float = 1.0) -> bool:
        """Ends the thread and aborts all requests; returns whether the thread ended in time."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    @property
    def num_running(self) -> int:
        return len(self._rows) - len(self._holes)

    @property
    def num_waiting(self) -> int:
        return len(self._queue.waiting)

    def load(self) -> ServerLoad:
        """Returns the load. Waiting requests count as running if there are free rows for them, because new
        weights send all requests back to the queue for a moment although the engine is not full.
        """
        running = [request for request in list(self._rows) if request is not None]
        num_rows, num_queued = self._runner.max_slots, self.num_waiting
        entering = min(num_queued, max(num_rows - len(running), 0))
        num_tokens = sum(request.length for request in running)
        capacity = num_rows * self._runner.max_length
        use, seconds = num_tokens / capacity, self._times.seconds
        return ServerLoad(len(running) + entering, num_queued - entering, use, *seconds)

    def submit(self, requests: Iterable[Request]) -> "Future[None]":
        batch = list(requests)
        return self.run(lambda: self._enqueue(batch), only_adds=True)

    def abort(self, prefix: str | None) -> "Future[int]":
        """Ends the requests whose ids begin with ``prefix`` (all if it is ``None``); returns their number."""
        return self.run(lambda: self._abort(prefix, "Aborted by request."))

    def abort_request(self, request: Request) -> "Future[None]":
        """Ends one request. Has no effect if the request has finished."""
        return self.run(lambda: self._finish(request, "The client went away."))

    def pause(self) -> "Future[None]":
        """Stops generation after the current step. All requests are kept."""
        return self.run(lambda: self._set_paused(True))

    def resume(self) -> "Future[None]":
        return self.run(lambda: self._set_paused(False))

    def set_version(self, version: str) -> "Future[None]":
        return self.run(lambda: self._set_version(version))

    def swap_weights(self, swap: Callable[[], None], version: str) -> "Future[float]":
        """Runs ``swap``, which must not fail half-way, between two steps.

        After a sleep, ``swap`` must replace all weights. Keys and values of the old weights are computed
        again. Returns the seconds for which generation stopped.
        """
        return self.run(lambda: self._swap_weights(swap, version))

    def sleep(self, release: Callable[[], None]) -> "Future[None]":
        """Ends all requests and frees keys and values; ``release`` must free the weights."""
        return self.run(lambda: self._sleep(release))

    def wake(self, allocate: Callable[[], None]) -> "Future[None]":
        """Makes a sleeping engine ready for new weights; ``allocate`` may allocate memory for them."""
        return self.run(lambda: self._wake_up(allocate))

    def run(self, function: Callable[[], _T], *, only_adds: bool = False) -> "Future[_T]":
        """Runs ``function`` on the engine's thread between two steps."""
        future: Future[_T] = Future()
        with self._wake:
            if self.failure is not None or self._closing:
                future.set_exception(EngineError(self._why_ended()))
                return future
            self._calls.append((function, future, only_adds))
            self._wake.notify()
        return future

    def _why_ended(self) -> str:
        if self.failure is not None:
            return f"The engine has failed: {self.failure!r}. Restart the server; see its log."
        return "The server is shutting down."

    # -- the thread -------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while self._carry_out_calls():
                if self._has_work():
                    self._step()
                self._report_changed()
        except BaseException as error:
            # Caught at the boundary of the thread: all waiting callers are told the cause.
            logger.exception("The engine's thread has failed. All requests are answered with 500.")
            self.failure = error
        finally:
            self._end()

    def _has_work(self) -> bool:
        return not self.is_paused and bool(self._queue.waiting or self.num_running)

    def _carry_out_calls(self) -> bool:
        """Waits until there are calls or a step to compute, and runs the calls; returns False when closing."""
        with self._wake:
            while not (self._calls or self._closing or self._has_work()):
                self._wake.wait()
            if self._closing:
                return False
            calls, self._calls = self._calls, deque()
        while calls:
            function, future, only_adds = calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # the caller has cancelled the call
            try:
                if not only_adds:
                    self._rate()  # under the weights that were there when it was asked for
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                self._refuse(calls, f"The engine has failed: {error!r}.")
                raise
        self._rate()
        return True

    def _refuse(self, calls: Iterable[_Call], reason: str) -> None:
        for _, future, _ in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(reason))

    def _end(self) -> None:
        with self._wake:
            self._closing = True
            calls, self._calls = self._calls, deque()
        self._times.flush()
        self._refuse(calls, self._why_ended())
        self._abort(None, self._why_ended())
        self._report_changed()

    def _report_changed(self) -> None:
        if self._changed:
            changed, self._changed = self._changed, []
            self.report(changed)

    # -- calls ------------------------------------------------------------------------

    def _enqueue(self, requests: list[Request]) -> None:
        for request in requests:
            request.start_segment(self.version)
            if (refusal := self.residence.refusal) is not None:
                self._finish(request, refusal)
                continue
            if request.logprob_start is not None:
                self._to_rate.append(request)
            if request.sampling.max_new_tokens == 0:
                if request.logprob_start is None:
                    self._finish_empty(request)
                continue
            seed = request.sampling.sampling_seed
            if seed is not None:
                generator = torch.Generator(self._runner.device)
                generator.manual_seed(seed)
                request.generator = generator
            self._queue.waiting.append(request)

    def _rate(self) -> None:
        """Computes logprobs of prompts submitted for rating, even during a pause, each with one version."""
        lengths = [len(request.prompt_ids) for request in self._to_rate]
        for indices in padded_batches(lengths, self._max_prefill_tokens):
            batch = [self._to_rate[i] for i in indices]
            num_top = max(request.num_top for request in batch)
            ratings = self._runner.rate([request.prompt_ids for request in batch], num_top)
            for request, rating in zip(batch, ratings, strict=True):
                request.rating = rating
        rated, self._to_rate = self._to_rate, []
        for request in rated:
            if request.sampling.max_new_tokens == 0:
                self._finish_empty(request)

    def _finish_empty(self, request: Request) -> None:
        request.finish_reason = {"type": "length", "length": 0}
        self._changed.append(request)

    def _abort(self, prefix: str | None, reason: str) -> int:
        everyone = [r for r in self._rows if r is not None] + list(self._queue.waiting)
        everyone += self._to_rate  # if the engine has failed
        chosen = [r for r in everyone if prefix is None or r.request_id.startswith(prefix)]
        for request in chosen:
            self._finish(request, reason)
        return len(chosen)

    def _finish(self, request: Request, reason: str) -> None:
        if request.finish_reason is not None:
            return
        request.finish_reason = {"type": "abort", "message": reason}
        self._queue.drop(request)
        if request.row is not None:
            self._vacate(request)
        self._changed.append(request)

    def _vacate(self, request: Request) -> None:
        assert request.row is not None, "only running requests hold a row"
        self._rows[request.row] = None
        self._holes.append(request.row)
        request.row = None
        self._batch = None

    def _set_version(self, version: str) -> None:
        self.version = version
        for request in (*self._rows, *self._queue.waiting):
            if request is not None:
                request.start_segment(version)

    def _set_paused(self, is_paused: bool) -> None:
        if self.is_paused:
            spans.add("engine", "pause", self._paused_at, time.monotonic())
        self.is_paused, self._paused_at = is_paused, time.monotonic()

    def _sleep(self, release: Callable[[], None]) -> None:
        self._abort(None, "The server was put to sleep.")
        self._rows, self._holes, self._batch = [], [], None
        self._runner.release()
        release()
        self.residence = Residence.ASLEEP
        self._set_version(UPDATING_LABEL)
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()  # for other processes
        return_free_memory()

    def _wake_up(self, allocate: Callable[[], None]) -> None:
        if self.residence is Residence.ASLEEP:
            allocate()
            self.residence = Residence.EMPTY

    def _swap_weights(self, swap: Callable[[], None], version: str) -> float:
        started = time.monotonic()
        swap()
        if self._runner.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # its copies on the GPU count as a stop
        self.num_swaps += 1
        self.residence = Residence.SERVED
        self._set_version(version)
        running = [r for r in self._rows if r is not None and r.prefilled_to is None]
        self.num_recomputed += self._queue.put_back(running)
        self._rows, self._holes, self._batch = [], [], None
        ended = time.monotonic()
        spans.add("engine", "swap", started, ended, version=version)
        return ended - started

    # -- one step ---------------------------------------------------------------------

    def _step(self) -> None:
        begin, num_decoding = time.monotonic(), self.num_running - self._queue.num_cut
        plan = self._queue.plan(num_decoding, self._runner.max_slots - self.num_running)
        for prefill in plan.prefills:
            self._give_rows(prefill)
            self._batch = None
        self._close_holes()
        if self._rows:
            self._forward(plan)
        self._times.add(plan, num_decoding, begin)
        self.num_steps += 1

    def _give_rows(self, prefill: Prefill) -> None:
        rowless = [request for request in prefill.requests if request.row is None]
        new_rows = [self._take_row(request) for request in rowless]
        # At once for all chunks: to grow the storage takes longer than a step.
        self._runner.cache.reserve(len(self._rows), len(prefill.tokens))
        if new_rows and prefill.start > 0:
            # They have joined a prompt of which some chunks were computed.
            source = prefill.requests[0].row
            assert source is not None, "the first request of a chunk has a row"
            for row in new_rows:
                self._runner.cache.copy(source, row, prefill.start)

    def _take_row(self, request: Request) -> int:
        if self._holes:
            request.row = self._holes.pop()
            self._rows[request.row] = request
        else:
            request.row = len(self._rows)
            self._rows.append(request)
        return request.row

    def _close_holes(self) -> None:
        if not self._holes:
            return
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
        for hole in sorted(self._holes):
            if hole >= len(self._rows):
                break
            request = self._rows.pop()
            assert request is not None and request.row is not None, "the last row is taken"
            self._runner.cache.copy(request.row, hole, request.num_cached)
            request.row = hole
            self._rows[hole] = request
            while self._rows and self._rows[-1] is None:
                self._rows.pop()
        self._holes.clear()

    def _forward(self, plan: PrefillPlan) -> None:
        requests = [r for r in self._rows if r is not None]
        if self._batch is None:
            self._batch = self._build_batch(requests)
        ids, positions, sampling = self._batch
        logits = self._runner.step(ids, positions, [r.num_cached for r in requests], plan)
        ids, logprobs = sample(logits, sampling, self._generator, self._runner.excluded)
        # A prompt that is cut has another token in its row in the next step.
        self._batch = None if self._queue.cut else (ids, positions + 1, sampling)
        self._take_tokens(requests, ids, logprobs)

    def _build_batch(self, requests: list[Request]) -> _Batch:
        # A row whose prompt is not complete samples nothing, so its own random numbers stay.
        generators = [r.generator if r.prefilled_to is None else None for r in requests]
        params = [r.sampling for r in requests]
        rows = [[r.next_input for r in requests], [r.num_cached - 1 for r in requests]]
        ids, positions, *columns = upload(
            [*rows, *SamplingBatch.columns(params)], self._runner.device, torch.float64
        )
        sampling = SamplingBatch.from_columns(columns, params, generators)
        return ids.long(), positions.long(), sampling

    def _take_tokens(
        self, requests: list[Request], ids: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        # Read at once, because each reading waits for the step. A double holds either number exactly.
        numbers = torch.stack((ids.double(), logprobs.double())).tolist()
        for request, token_id, logprob in zip(requests, *numbers, strict=True):
            if request.prefilled_to is not None:
                continue
            self.num_tokens += 1
            if request.append(int(token_id), logprob):
                self._vacate(request)
            self._changed.append(request)
