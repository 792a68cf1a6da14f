"""Looks at processes that may end at any moment."""

import contextlib

import psutil


def has_words(process: psutil.Process, words: tuple[str, ...]) -> bool:
    with contextlib.suppress(psutil.Error):
        return all(word in " ".join(process.cmdline()) for word in words)
    return False


def descendants(*words: str) -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if has_words(p, words)]
