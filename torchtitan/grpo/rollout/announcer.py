# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Collects the sentences that the rollout process tells the user through rank 0."""

import asyncio
import logging
from collections import deque

logger = logging.getLogger(__name__)


class Announcer:
    """A queue of sentences. It must be made in the event loop that sends them.

    Errors that other modules log are announced as well, except those with a traceback, which end
    the process and are reported in another way.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._texts: deque[str] = deque()
        self._has_news = asyncio.Event()
        self._handler = _ErrorHandler(self)
        logging.getLogger("torchtitan.grpo").addHandler(self._handler)

    def announce(self, text: str) -> None:
        """Logs a sentence and queues it."""
        logger.warning("%s", text)
        self.queue(text)

    def queue(self, text: str) -> None:
        """Queues a sentence. Any thread may call it."""
        self._texts.append(text)
        self._loop.call_soon_threadsafe(self._has_news.set)

    async def wait(self, timeout_seconds: float) -> None:
        """Waits for a sentence, or until the timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._has_news.wait()
        except TimeoutError:
            pass

    def take(self) -> list[str]:
        """Takes all sentences out of the queue."""
        self._has_news.clear()
        return [self._texts.popleft() for _ in range(len(self._texts))]

    def close(self) -> None:
        """Ends the announcement of errors that are logged."""
        logging.getLogger("torchtitan.grpo").removeHandler(self._handler)


class _ErrorHandler(logging.Handler):
    """Queues the errors that are logged."""

    def __init__(self, announcer: Announcer) -> None:
        super().__init__(logging.ERROR)
        self._announcer = announcer

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:
            self._announcer.queue(record.getMessage())
