# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Renders the model's chat template, and checks that it prints messages in full, the same way each time.

A template may loop forever or fill the memory. It is therefore rendered in a worker process, under
limits of time, memory and length of text. So only the worker process has to import transformers.
"""

import asyncio
import atexit
import contextlib
import functools
import itertools
import json
import pickle
import re
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from torchtitan.grpo.config import Workers
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.workers.process import WorkerLost, WorkerProcess

_Result = TypeVar("_Result")

_numbers = itertools.count()
_PROBE_WORDS = 400
_MODULE = "torchtitan.grpo.rollout.template_renderer"
_CPU_SECONDS = 10.0
_MEMORY_BYTES = 2**30
_MOST_CHARACTERS = 2**20  # besides a multiple of those of the messages
_TIMES_LONGER = 8
# Of waiting for one answer. The process may import transformers first, on a busy machine.
_WAIT_SECONDS = 300.0
_EXIT_SECONDS = 10.0
_PROBE = re.compile(r"qzv(\d+)k(\d+)q")
PLAIN, WRITTEN = "\ufdd0", "\ufdd1"
"""In rendered text, the first stands behind each character of a special token that data spells; in
what is tokenized, the second before each one that the template has written. Unicode reserves both
for such use. In data, U+FFFD takes their place: removed, they would let their neighbours meet."""
_UNMARKED = str.maketrans(dict.fromkeys(PLAIN + WRITTEN, "\ufffd"))

Messages = Sequence[dict[str, Any]]
_as_json = functools.partial(json.dumps, ensure_ascii=False)
_TEXTS = (None, "text", "input_text", "output_text", "refusal")
_MEDIA = re.compile(r"(input_)?(image|audio|video)s?(_(url|path|file|byte|\d+)s?)?|pixel_values")


def text_of(message: Mapping[str, Any]) -> Any:
    """Returns a message's content, with a list of parts joined. Raises ValueError if a part is not text."""
    if media := media_in(message):
        raise ValueError(repr(media))
    content = message.get("content")
    if not isinstance(content, list):
        return content
    texts = []
    for part in [{"text": part} if isinstance(part, str) else part for part in content]:
        kind = (media_in(part) or part.get("type")) if isinstance(part, dict) else type(part)
        text = part.get("text", part.get("refusal")) if kind in _TEXTS else None
        if not isinstance(text, str):
            raise ValueError(f"a part of type {kind!r}, {part!r:.80}")
        texts.append(text)
    return "".join(texts)


def media_in(values: Mapping[str, Any]) -> str | None:
    """Returns the first key that names images, audio or video and has a value."""
    return next((key for key, value in values.items() if value and _MEDIA.fullmatch(key)), None)


def tools_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the functions in a row's column ``tools``, a list or its JSON. Raises ValueError otherwise."""
    tools = columns.get("tools") or []
    with contextlib.suppress(ValueError, RecursionError):
        tools = json.loads(tools) or [] if isinstance(tools, str) else tools
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        return tools
    raise ValueError(
        "column 'tools' is shown to the chat template and must be a list of functions, or JSON of "
        f"one, got {tools!r:.80}. If it is something else, rename it (prompts.rename)."
    )


class LeftOut(ValueError):
    """The chat template does not print all text or tool calls of a message."""


class ChatTemplate:
    """Renders conversations with the template of a model directory.

    A template silently drops messages of a role that it does not know, such as system or tool. To
    find out, a conversation with a new pair of adjacent kinds of messages, or a new kind at its begin
    or end, is also rendered with artificial words in place of its text, which must all be printed.

    ``date`` is what the template prints as the current time, in ISO format (empty: now). Matches of
    ``special``, in tools and in messages other than the assistant's, are marked as plain text.
    """

    def __init__(
        self,
        path: Path,
        variables: Mapping[str, Any],
        date: str = "",
        special: re.Pattern[str] | None = None,
    ) -> None:
        self._path, self._variables, self._special = path, dict(variables), special
        self._date = date or datetime.now().isoformat()
        self._number = next(_numbers)
        self._known: set[tuple[Any, Any]] = set()
        self._refused: set[frozenset[tuple[Any, Any]]] = set()
        self._longest = 2
        self._source = self._template()
        for name in self._variables:  # Jinja would ignore one that the template never mentions
            if not self.reads(name):
                raise ValueError(
                    f"prompts.chat_template_kwargs sets {name!r}, which the chat template of {path} does "
                    "not read. Remove it, or check its spelling against the template."
                )

    @property
    def date(self) -> str:
        """The date that the template prints as today's date, or an empty string if it prints none."""
        return self._date[:10] if "strftime_now" in self._source else ""

    def render(self, messages: Messages, *, opens_turn: bool = True, tools: Messages = ()) -> str:
        """Returns the text of a conversation, with the start of the assistant's turn.

        Templates expect tool calls in different forms, so each form is tried. Raises ``ValueError``
        if the template can render none, and :class:`LeftOut` if it leaves something out.
        """
        if self._special is not None:
            tools = marked_plain(self._special, tools)
            messages = [
                m if m.get("role") == "assistant" else marked_plain(self._special, m)
                for m in messages
            ]
        texts, errors = [], []
        for form in _forms_of_calls(messages):
            try:
                texts.append(self._checked(form, opens_turn=opens_turn, tools=tools))
            except ValueError as error:
                errors.append(error)
                continue
            if not _quotes_arguments(form, texts[-1]):
                return texts[-1]
        if not texts:
            raise errors[0]
        return texts[0]

    def _checked(self, messages: Messages, *, opens_turn: bool, tools: Messages) -> str:
        text = self._render(messages, opens_turn=opens_turn, tools=tools)
        # Pairs, because long conversations would otherwise be new again and again. Longer ones are
        # checked as well whenever they have doubled, in case a template prints only so many messages.
        pairs = frozenset(itertools.pairwise([None, *map(_shape, messages), None]))
        is_new = not pairs <= self._known or len(messages) > 2 * self._longest
        if is_new and pairs not in self._refused:
            if self._render(messages, opens_turn=opens_turn, tools=tools) != text:
                raise ValueError(
                    f"The chat template of {self._path} must render the same messages to the same text, "
                    "but it prints something else each time. Remove random choices from it."
                )
            if self._check_roles(messages):
                self._known |= pairs
                self._longest = max(self._longest, len(messages))
            else:
                self._refused.add(pairs)
        return text

    def _render(self, messages: Messages, *, opens_turn: bool = True, tools: Messages = ()) -> str:
        try:
            return self._ask(list(messages), opens_turn=opens_turn, tools=tools) or ""
        except ValueError as error:
            raise ValueError(
                f"The chat template of {self._path} cannot render {messages!r:.200}: {error}"
            ) from error

    def _ask(
        self, messages: list[Any] | None, *, opens_turn: bool = True, tools: Messages = ()
    ) -> str | None:
        return template_process().ask(
            {
                "number": self._number,
                "path": str(self._path),
                "messages": messages,
                "tools": list(tools),
                "opens_turn": opens_turn,
                "variables": self._variables,
                "date": self._date,
            }
        )

    def _template(self) -> str:
        try:
            template = self._ask(None)
        except ValueError as error:
            raise ValueError(
                f"The tokenizer in {self._path}, whose chat template is needed, cannot be loaded: "
                f"{error}"
            ) from error
        if template is None:
            raise ValueError(
                f"The prompts are chat messages, but the tokenizer in {self._path} has no chat "
                "template. Use string prompts (prompts.template), or a model directory with a chat "
                "template."
            )
        return template

    def reads(self, name: str) -> bool:
        """Whether the template mentions a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    def _check_roles(self, messages: Messages) -> bool:
        """Raises LeftOut if a message is not printed in full. Returns whether this could be checked."""
        probes = [_probed(message, position) for position, message in enumerate(messages)]
        try:
            printed = set(_PROBE.findall(self._render(probes, opens_turn=False).lower()))
        except ValueError:  # it refuses such text, while it has rendered the messages themselves
            return False
        for position, probe in enumerate(probes):
            words = set(_PROBE.findall(str(probe)))
            if missing := words - printed:
                calls = set(_PROBE.findall(str(probe.get("tool_calls"))))
                what = "the tool_calls of" if missing <= calls else "what is said by"
                raise LeftOut(
                    f"The chat template of {self._path} must print every message, but it leaves out "
                    f"{'part of ' if missing < words else ''}{what} the role {probe['role']!r} in "
                    f"message {position + 1} of {len(probes)}. Say it in a role that the template prints, "
                    "remove it (prompts.system_prompt is the role 'system'), or correct the template."
                )
        return True


def marked_plain(special: re.Pattern[str], value: Any) -> Any:
    """Returns a text, or nested values, with :data:`PLAIN` after each character that ``special`` matches."""
    if isinstance(value, str):
        text = value.translate(_UNMARKED)
        return special.sub(lambda found: PLAIN.join([*found[0], ""]), text)
    if isinstance(value, Mapping):
        return {marked_plain(special, k): marked_plain(special, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [marked_plain(special, one) for one in value]
    return value


def _forms_of_calls(messages: Messages) -> Iterator[Messages]:
    """Yields messages as they are and, if there are tool calls, in the two forms that templates expect.

    In a message with tool calls but no text, most templates expect empty content, and arguments that
    are objects. Those of DeepSeek expect null content, and arguments that are strings.
    """
    yield [{key: of_key for key, of_key in m.items() if of_key is not None} for m in messages]
    if any(message.get("tool_calls") for message in messages):
        yield [_formed(message, "", str, strict_json.loads) for message in messages]
        yield [_formed(message, None, dict, _as_json) for message in messages]


def _formed(
    message: dict[str, Any], empty: str | None, kind: type, form: Callable[[Any], Any]
) -> dict[str, Any]:
    """Returns a message in which ``form`` has converted all arguments of calls that are of type ``kind``."""
    calls = []
    for call, function in _calls(message):
        with contextlib.suppress(ValueError):  # text that is no JSON stays as it is
            if isinstance(arguments := function.get("arguments"), kind):
                call = call | {"function": function | {"arguments": form(arguments)}}
        calls.append(call)
    changed = {"content": message.get("content") or empty, "tool_calls": calls}
    return message | changed if calls else message


def _calls(message: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the calls of a message, each with its function (an empty dict if it has none)."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        yield call, function if isinstance(function, dict) else {}


def _quotes_arguments(messages: Messages, text: str) -> bool:
    """Whether the template has printed a JSON string of arguments as a string within quotes."""
    functions = [function for message in messages for _, function in _calls(message)]
    given = [function.get("arguments") for function in functions]
    return any(isinstance(one, str) and _as_json(one) in text for one in given)


def _shape(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """The properties of a message, other than its text, that a template may depend on."""
    num_calls, content = len(list(_calls(message))), message.get("content")
    kind = len(content) if isinstance(content, list) else type(content)
    return message.get("role"), kind, bool(content), num_calls, *sorted(message)


def _probed(message: Mapping[str, Any], position: int) -> dict[str, Any]:
    """Replaces the text and the called functions of a message by words that no template contains."""
    words = (f"qzv{position}k{number}q" for number in itertools.count())
    probe = dict(message)
    if isinstance(content := probe.get("content"), list):
        probe["content"] = [_probed_text(part, "text", words) for part in content]
    elif isinstance(content, str) and content.strip():
        probe = _probed_text(probe, "content", words)
    if isinstance(probe.get("tool_calls"), list):
        probe["tool_calls"] = [
            call | {"function": function | {"name": next(words)}} if "name" in function else call
            for call, function in _calls(probe)
        ]
    return probe


def _probed_text(holder: Any, key: str, words: Iterator[str]) -> Any:
    if not isinstance(holder, dict) or not isinstance(holder.get(key), str):
        return holder
    # Lines, because a template might print only the first one.
    return holder | {key: "\n".join(itertools.islice(words, _PROBE_WORDS))}


class _TemplateProcess:
    """Renders in a worker process, which is started when it is first needed. Thread-safe.

    The worker also ends when this process ends and its pipe closes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: WorkerProcess[str] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="templates", daemon=True
        )
        self._thread.start()

    def ask(self, request: dict[str, Any]) -> str | None:
        """Returns the rendered text.

        Raises ``ValueError`` if the tokenizer cannot be loaded, or the template fails or reaches a limit.
        Raises ``TimeoutError`` if the worker does not answer, and ``RuntimeError`` if it ends twice.
        """
        said = len(str([request["messages"], request["tools"]]))
        limits = {
            "cpu_seconds": _CPU_SECONDS,
            "memory_bytes": _MEMORY_BYTES,
            "most_characters": _MOST_CHARACTERS + _TIMES_LONGER * said,
        }
        with self._lock:
            # Somebody else may have ended the worker, for example for want of memory.
            found = self._exchange(request | limits) or self._exchange(request | limits)
        if found is None:
            raise RuntimeError(
                "The process that renders the chat template was ended twice. See the machine's log: "
                "it may be short of memory."
            )
        if "limit" in found:
            raise ValueError(
                f"it took more than {found['limit']} to render, and may loop without end. Correct it."
            )
        if "error" in found:
            raise ValueError(found["error"])
        return found["text"]

    def close(self) -> None:
        """Kills the worker, even if another thread is waiting for its answer."""
        if self._worker is not None:
            self._wait(self._worker.kill(), _EXIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_EXIT_SECONDS)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the worker's answer, or ``None`` if it has ended without one."""
        try:
            return self._wait(self._answer(request), 2 * _WAIT_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(
                f"The process that renders the chat template of {request['path']} did not answer "
                f"within {_WAIT_SECONDS:g} s. The machine may be overloaded."
            ) from error
        except WorkerLost as lost:
            is_slow = lost.exit_code == -signal.SIGPROF
            return {"limit": f"{request['cpu_seconds']:g} s of processor time"} if is_slow else None

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._worker is None or self._worker.is_lost:
            decode = msgspec.msgpack.Decoder(str).decode
            self._worker = WorkerProcess(_MODULE, decode, lambda reason: None, Workers())
            await self._worker.start()
        # Messages may hold what msgpack does not: large integers, and halves of surrogate pairs.
        return json.loads(await self._worker.call_or_kill(pickle.dumps(request), _WAIT_SECONDS))

    def _wait(self, doing: Coroutine[Any, Any, _Result], seconds: float) -> _Result:
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(seconds)


@functools.cache
def template_process() -> _TemplateProcess:
    process = _TemplateProcess()
    atexit.register(process.close)
    return process
