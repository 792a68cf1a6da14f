# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The process that renders chat templates for its owner, `chat_template.py`.

This process receives requests as pickled dicts, and answers in JSON. It imports transformers without
torch, which saves seconds.
"""

import contextlib
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from torchtitan.grpo.workers.channel import WorkerChannel

_tokenizers: dict[int, Any] = {}


@contextlib.contextmanager
def _limited(cpu_seconds: float, memory_bytes: int) -> Iterator[None]:
    """Limits a block: ends the process after ``cpu_seconds``, raises MemoryError above ``memory_bytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = Path("/proc/self/statm")
    if size.exists():
        taken = int(size.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, hard))
    # The template has no chance to catch SIGPROF, and neither has an operation of C code.
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _tokenizer(number: int, path: str) -> Any:
    if number not in _tokenizers:
        from transformers import AutoTokenizer

        _tokenizers[number] = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return _tokenizers[number]


def _render(tokenizer: Any, request: dict[str, Any]) -> str:
    from transformers.utils import chat_template_utils

    date = datetime.fromisoformat(request["date"])
    template = chat_template_utils._compile_jinja_template(tokenizer.get_chat_template())
    # Variables must be plain data, so the function that prints the date is set here.
    template.environment.globals["strftime_now"] = date.strftime
    messages, settings = request["messages"], dict(request["variables"])
    settings |= {"tools": request["tools"] or None, "add_generation_prompt": request["opens_turn"]}
    if any(message.get("content", "") is None for message in messages):
        # The library leaves nulls out, for which DeepSeek's templates look.
        return template.render(messages=messages, **tokenizer.special_tokens_map, **settings)
    return tokenizer.apply_chat_template(messages, tokenize=False, **settings)


def answer(request: dict[str, Any]) -> dict[str, str | None]:
    """Returns a dict with the rendered ``text``, an ``error``, or the ``limit`` that was exceeded.

    If the request has no messages, ``text`` is the template itself, or None if the model has none.
    """
    try:
        tokenizer = _tokenizer(request["number"], request["path"])
        if request["messages"] is None:
            has_template = tokenizer.chat_template is not None
            return {"text": tokenizer.get_chat_template() if has_template else None}
        with _limited(request["cpu_seconds"], request["memory_bytes"]):
            text = _render(tokenizer, request)
    except MemoryError:
        return {"limit": f"{request['memory_bytes'] / 2**30:g} GiB of memory"}
    except Exception as error:  # a template may raise anything
        return {"error": str(error) or type(error).__name__}
    most = request["most_characters"]
    return {"text": text} if len(text) <= most else {"limit": f"{most} characters of text"}


def main() -> None:
    """Answers until the owner closes the pipe."""
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    channel = WorkerChannel(lambda body: pickle.loads(msgspec.msgpack.decode(body)))
    while (received := channel.read()) is not None:
        call, request = received
        channel.reply(call, json.dumps(answer(request), allow_nan=False))


if __name__ == "__main__":
    main()
