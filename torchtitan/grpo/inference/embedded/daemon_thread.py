# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs blocking calls of the server, each on a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def run_in_thread(name: str, function: Callable[[], _T]) -> _T:
    """Runs ``function`` on a daemon thread, which cannot keep the process alive if it hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def target() -> None:
        result, caught = None, None
        try:
            result = function()
        except BaseException as error:
            # Caught at the boundary of the thread, and raised again by the future.
            caught = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, caught)

    threading.Thread(target=target, name=f"embedded-{name}", daemon=True).start()
    return await future
