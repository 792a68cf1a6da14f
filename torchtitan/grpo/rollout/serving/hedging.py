# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A completion whose server stalls is asked of a second one, and the first answer counts.

Dean and Barroso, The Tail at Scale (2013, https://doi.org/10.1145/2408776.2408794). There, both
would answer the same; here they are two samples, and the shorter would win: a completion that
is merely long must not be hedged. So it is hedged only where the longest answer that was
allowed would have been written by now, at the speed that its server has shown.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.rollout.serving.attempts import GivenBack
from torchtitan.grpo.rollout.serving.server_state import Job, Server

_T = TypeVar("_T")


def is_overdue(
    server: Server, job: Job, max_new_tokens: int, hedge_seconds: float, now: float
) -> bool:
    """Whether the server seems to have stalled.

    Args:
        server: Where the completion is.
        job: Its place there.
        max_new_tokens: That the completion may have.
        hedge_seconds: ``rollout.hedge_seconds``.
        now: On the monotonic clock.
    """
    speed = server.tokens_per_second
    longest = max_new_tokens / speed if speed else 0.0
    return now - job.started_at >= max(hedge_seconds, longest)


async def first_answer(
    first: asyncio.Task[_T],
    start_hedge: Callable[[], asyncio.Task[_T] | None],
    look_seconds: float,
) -> tuple[_T, bool]:
    """The answer of whichever attempt succeeds first; the other one is cancelled.

    An attempt that fails while the other is under way is of no consequence.

    Args:
        first: An attempt.
        start_hedge: Starts the second, or returns None where it is not time, or there is no
            room for it; asked again and again until it has started one.
        look_seconds: Pause between two calls of it.

    Returns:
        The answer, and whether it is the second attempt's.

    Raises:
        ServerError: All attempts failed; :class:`GivenBack` where none of them says that
            requests fail on its server.
    """
    running, hedge = {first}, None
    failure: ServerError | None = None
    try:
        while running:
            timeout = look_seconds if hedge is None else None
            done, _ = await asyncio.wait(
                running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            running -= done
            errors = {task: task.exception() for task in done}
            for task, error in errors.items():
                if error is None:
                    return task.result(), task is hedge
                if not isinstance(error, ServerError):
                    raise error
                if failure is None or isinstance(failure, GivenBack):
                    failure = error
            if running and hedge is None and (hedge := start_hedge()) is not None:
                running.add(hedge)
    finally:
        for task in running:
            task.cancel()  # its server is told
    assert failure is not None, "an attempt that did not succeed has failed"
    raise failure
