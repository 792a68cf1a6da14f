"""Looks at processes that may end at any moment."""

import contextlib

import psutil


def has_words(process: psutil.Process, words: tuple[str, ...]) -> bool:
    """Returns whether a process lives and its command line holds all words."""
    with contextlib.suppress(psutil.Error):
        return all(word in " ".join(process.cmdline()) for word in words)
    return False


def descendants(*words: str) -> list[psutil.Process]:
    """Returns the living descendants of this process whose command lines hold all words."""
    return [p for p in psutil.Process().children(recursive=True) if has_words(p, words)]
