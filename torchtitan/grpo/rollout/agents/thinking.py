# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Divides what a model wrote into its thinking and its answer.

Thinking is open where the chat template has opened it, or the answer begins with the tag. The first
end tag ends it; any later one is text of the answer.

The state of an unfinished answer is the tag that will end its thinking. It is empty if no thinking
can follow any more, and None if nothing was written yet, so that thinking may begin.
"""

_TAGS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
THINKING_MARKS = (*_TAGS, *_TAGS.values())


def opened_by(shown: str) -> str | None:
    """Returns the state behind a text at whose end the template has opened the model's turn."""
    shown = shown.rstrip()
    if shown.endswith(tuple(_TAGS.values())):
        return ""  # the template has switched thinking off
    return next((end for begin, end in _TAGS.items() if shown.endswith(begin)), None)


def divided(written: str, state: str | None) -> tuple[str, str, str | None]:
    """Returns the thinking, the answer, and the state behind them."""
    text = written.lstrip()
    for begin, end in _TAGS.items():
        if text.startswith(begin) and state in (None, end):
            text, state = text.removeprefix(begin), end
    if not state:
        return "", written, "" if text else state
    thinking, tag, answer = text.partition(state)
    return thinking.strip(), answer.lstrip("\n"), "" if tag else state
