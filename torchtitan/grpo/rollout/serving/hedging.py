# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Sends a completion to a second server if the first one stalls, and uses the first answer.

See Dean and Barroso, The Tail at Scale (2013, https://doi.org/10.1145/2408776.2408794). In that
paper, both servers give the same answer. Here, the answers are two different samples, and the
shorter one would usually arrive first, which would bias training towards short answers. A
completion is therefore hedged only if its server, at its usual speed, would by now have generated
the longest allowed answer.
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
    """Returns whether the server seems to have stalled.

    Args:
        server: The server of the completion.
        job: The completion's job on that server.
        max_new_tokens: Maximum length of the completion.
        hedge_seconds: ``rollout.hedge_seconds``.
        now: Current time on the monotonic clock.
    """
    speed = server.tokens_per_second
    longest = max_new_tokens / speed if speed else 0.0
    return now - job.started_at >= max(hedge_seconds, longest)


async def first_answer(
    first: asyncio.Task[_T],
    start_hedge: Callable[[], asyncio.Task[_T] | None],
    look_seconds: float,
) -> tuple[_T, bool]:
    """Returns the answer of the attempt that succeeds first, and cancels the other attempt.

    A failed attempt is ignored while the other one is running.

    Args:
        first: The first attempt.
        start_hedge: Starts the second attempt, or returns ``None`` if it is too early or there is
            no room. It is called repeatedly until it starts one.
        look_seconds: Time between two calls of ``start_hedge``.

    Returns:
        The answer, and whether the second attempt gave it.

    Raises:
        ServerError: If all attempts failed. The error is :class:`GivenBack` if every attempt
            failed because its server left READY.
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
            task.cancel()  # this notifies its server
    assert failure is not None, "an attempt that did not succeed must have failed"
    raise failure
