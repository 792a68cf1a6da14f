# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Decides which tokens of waiting prompts a step computes, and which prompts are rated together.

Stall-free batching after Sarathi-Serve (https://arxiv.org/abs/2403.02310), without its profile.
Each step computes one token of every running request first. The rest of its token budget goes to
prompts, in the order of their arrival. A prompt that does not fit is cut: the step computes a chunk
of it, and the following steps the rest.

Invariants:
    - At most one prompt is cut at a time, and nothing overtakes it.
    - A step computes at least one token of the first unfinished prompt, if a row is free for it.
    - The tokens of a step (one of each running request, and those of prompts with their padding) are
      at most the budget. Further requests with equal tokens are free, as each adds only its row's token.

The budget is ``max_prefill_tokens`` where nobody would gain from small steps: if no request is
running, or if requests are computed again because the weights have changed.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchtitan.grpo.inference.embedded.request import Request
from torchtitan.grpo.system import spans


@dataclass(eq=False)
class Prefill:
    """Tokens to compute once for several requests whose tokens so far are all equal to them.

    Before the planned step, the requests' slots hold the first ``start`` tokens, and after it the first
    ``stop``.
    """

    tokens: list[int]
    requests: list[Request]
    start: int = 0
    stop: int = 0

    def plan(self, num_tokens: int) -> int:
        """Plans the next ``num_tokens`` tokens, or all that are left. Returns how many were planned."""
        self.start, self.stop = self.stop, min(self.stop + num_tokens, len(self.tokens))
        for request in self.requests:
            request.prefilled_to = self.stop if self.is_cut else None
        return self.stop - self.start

    @property
    def rows(self) -> list[int]:
        """The rows of the requests. Every request has been given one by the time the step is computed."""
        return [request.row for request in self.requests if request.row is not None]

    @property
    def is_cut(self) -> bool:
        return self.stop < len(self.tokens)


@dataclass
class PrefillPlan:
    """The prompt tokens of one step: prompts that are computed whole, and at most one chunk."""

    whole: list[Prefill] = field(default_factory=list)
    chunk: Prefill | None = None

    @property
    def prefills(self) -> list[Prefill]:
        return [*self.whole, *([] if self.chunk is None else [self.chunk])]


class PrefillQueue:
    """The requests that wait for a row, and the prompt, if any, that is being computed in chunks."""

    def __init__(self, step_tokens: int, max_prefill_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.cut: Prefill | None = None

    @property
    def num_cut(self) -> int:
        return 0 if self.cut is None else len(self.cut.requests)

    def plan(self, num_running: int, num_free: int) -> PrefillPlan:
        """Plans the prompt tokens of a step in which ``num_running`` requests sample as well.

        The planned requests leave the queue. The caller gives those without a row one of ``num_free`` rows.
        """
        budget = self._budget(num_running)
        plan = PrefillPlan(chunk=self.cut)
        if self.cut is not None:
            num_free -= self._take_equal(self.cut, num_free)
            budget -= self.cut.plan(budget)
            if self.cut.is_cut:
                return plan
            self.cut = None
        self._plan_waiting(plan, budget, num_free)
        return plan

    def drop(self, request: Request) -> None:
        if self.cut is not None and request in self.cut.requests:
            self.cut.requests.remove(request)
            if not self.cut.requests:
                self.cut = None
        elif request.row is None and request in self.waiting:
            self.waiting.remove(request)

    def put_back(self, running: Iterable[Request]) -> int:
        """Puts requests back at the front of the queue, to be computed from the start.

        Does so for ``running`` and for the requests that are being computed in chunks. Returns their number.
        """
        first = list(running)
        if self.cut is not None:
            first += self.cut.requests
            self.cut = None
        for request in first:
            request.row = request.prefilled_to = None
        self.waiting.extendleft(reversed(first))
        return len(first)

    def _budget(self, num_running: int) -> int:
        first = self.cut.requests[0] if self.cut is not None else next(iter(self.waiting), None)
        if num_running == 0 or (first is not None and first.output_ids):
            return self._max_prefill_tokens
        return self._step_tokens - num_running

    def _take_equal(self, prefill: Prefill, num_free: int) -> int:
        """Moves requests with the same tokens from the queue's front to ``prefill``. Returns how many."""
        count = 0
        while count < num_free and self.waiting and self.waiting[0].token_ids == prefill.tokens:
            request = self.waiting.popleft()
            if not request.output_ids:
                request.shared_prompt_tokens = len(request.prompt_ids)
            prefill.requests.append(request)
            count += 1
        return count

    def _plan_waiting(self, plan: PrefillPlan, budget: int, num_free: int) -> None:
        """Adds whole prompts to ``plan`` while they fit, and then part of the next one if there is no chunk."""
        found: dict[tuple[int, ...], Prefill] = {}
        longest = 0
        while self.waiting and num_free > 0:
            tokens = tuple(self.waiting[0].token_ids)
            if tokens in found:
                num_free -= self._take_equal(found[tokens], num_free)
                continue
            wider, room = max(longest, len(tokens)), budget - len(found) * longest
            fits = (len(found) + 1) * wider <= budget
            if not fits and (plan.chunk is not None or room <= 0):
                return
            prefill = Prefill(list(tokens), [self.waiting.popleft()])
            num_free -= 1 + self._take_equal(prefill, num_free - 1)
            prefill.plan(len(tokens) if fits else room)
            if not fits:
                plan.chunk = prefill
                self.cut = prefill if prefill.is_cut else None
                return
            plan.whole.append(prefill)
            found[tokens], longest = prefill, wider


def default_step_tokens(max_slots: int, device: str) -> int:
    """Returns the default token budget. On a GPU, 512 prompt tokens beside the decoding rows cost little."""
    return max_slots + (512 if device == "cuda" else max(16, max_slots // 2))


def padded_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Splits sequences into batches of similar lengths; returns the indices of each batch.

    A batch has at most ``max_tokens`` tokens, padding included, unless it is one longer sequence.

    >>> padded_batches([2, 6, 3], 8)  # two of 3 tokens; a third one of 6 would make 18
    [[0, 2], [1]]
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        # The lengths ascend, so that this one is the length of its whole batch.
        if batches and (len(batches[-1]) + 1) * lengths[i] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class StepTimes:
    """Seconds of prefill and of decoding. A step does both, and its time is divided by its tokens."""

    def __init__(self) -> None:
        self.seconds = (0.0, 0.0)
        self._windows = spans.Merged("engine")

    def add(self, plan: PrefillPlan, num_decoding: int, begin: float) -> None:
        """Adds a step that began at ``begin``, on the monotonic clock, and ends now."""
        end = time.monotonic()
        num_prefilled = sum(prefill.stop - prefill.start for prefill in plan.prefills)
        share = num_prefilled / max(num_prefilled + num_decoding, 1)
        prefill, decode = self.seconds
        self.seconds = prefill + share * (end - begin), decode + (1.0 - share) * (end - begin)
        self._windows.add("prefill" if plan.prefills else "decode", begin, end)

    def flush(self) -> None:
        self._windows.flush()
