"""Looks at processes that may end at any moment."""

import contextlib
import time

import psutil

_EXEC_SECONDS = 5.0


def has_words(process: psutil.Process, words: tuple[str, ...]) -> bool:
    deadline = time.monotonic() + _EXEC_SECONDS
    with contextlib.suppress(psutil.Error):  # a process that has ended has no words
        # Linux shows no words for a moment while a process replaces its program.
        while not (command := " ".join(process.cmdline())) and time.monotonic() < deadline:
            time.sleep(0.001)
        return all(word in command for word in words)
    return False


def descendants(*words: str) -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if has_words(p, words)]
