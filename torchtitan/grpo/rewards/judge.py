# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The built-in reward function ``judge``, which asks a model on a server; see `config/judge.py`."""

import asyncio
import functools
import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from torchtitan.grpo.config.judge import Judge as Settings
from torchtitan.grpo.config.judge import template_text
from torchtitan.grpo.inference.http import HttpConnection, RouteError, excerpt
from torchtitan.grpo.rewards import ScoreLater
from torchtitan.grpo.rewards.builtin import Completion, completion_text
from torchtitan.grpo.rewards.reward_calls import LARGEST_REWARD
from torchtitan.grpo.rewards.verdicts import found_score, written_score

# A request on a connection that the server has closed meanwhile is lost, and made again.
_IDLE_SECONDS = 4.0
_MAX_ANSWER_BYTES = 4 * 2**20
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 8.0
# The judge notices that time is up before its group is cancelled, and so can have it scored later.
_SHARE_OF_LIMIT = 0.9
_CACHE_SIZE = 4096
_KEPT_CHARS = 2000
# Searching a text of a few MiB that is full of numbers would block the event loop for seconds.
_SEARCHED_CHARS = 2**16
# Any other reason, such as `length` or `content_filter`, says that there was more to come.
_FINISHED = (None, "stop", "eos", "eos_token", "stop_sequence", "end_turn", "tool_calls")


@dataclass(frozen=True)
class _Verdict:
    """``score`` is ``None`` if the judge's ``answer`` holds none."""

    score: float | None
    answer: str


class Judge:
    """Scores completions by the answers of a judge, in one event loop.

    Verdicts are kept, so that equal requests are sent once. ``limit_seconds`` is that of a group.
    """

    def __init__(self, settings: Settings, limit_seconds: float) -> None:
        key = None
        if (variable := settings.api_key_variable) is not None and not (
            key := os.environ.get(variable)
        ):
            raise ValueError(
                f"reward.judge.api_key_variable names {variable}, which must be set in the environment "
                "of the run and named in workers.pass_variables, but the worker does not have it."
            )
        self._settings, self._limit = settings, limit_seconds * _SHARE_OF_LIMIT
        self._template = template_text(settings)
        self._score = re.compile(settings.score) if settings.score else None
        self._http = HttpConnection(
            settings.url or "",
            api_key=key,
            admin_key=None,
            timeout_seconds=settings.timeout_seconds or limit_seconds / (settings.retries + 1),
            idle_seconds=_IDLE_SECONDS,
            proxy=_proxy_for(settings.url or ""),
            key_hint="Check the key in the variable that reward.judge.api_key_variable names.",
        )
        self._places = asyncio.Semaphore(settings.max_concurrent)
        self._asked: dict[bytes, asyncio.Task[_Verdict]] = {}

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Any], None],
        **columns: Any,
    ) -> list[float | None]:
        texts = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            values = {
                name: of_all[i] for name, of_all in columns.items() if isinstance(of_all, list)
            }
            values |= {"prompt": _prompt_text(prompt), "completion": completion_text(completion)}
            texts.append(self._filled(values))
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._limit):
                verdicts = await asyncio.gather(*map(self._verdict, texts))
        except TimeoutError as error:
            raise ScoreLater(
                f"{self._http.url} must answer for all completions of a group within {self._limit:g} s "
                f"(reward.timeout_seconds), with at most {self._settings.max_concurrent} requests of a worker "
                "at once (reward.judge.max_concurrent). Raise one of them, or let more servers judge."
            ) from error
        scores = [verdict.score for verdict in verdicts]
        log_metric("judge_seconds", time.monotonic() - begun)
        log_metric("judge_unreadable", scores.count(None) / len(scores))
        if self._settings.kind == "chat":
            log_extra("judge", [verdict.answer for verdict in verdicts])
        return scores

    def _filled(self, values: Mapping[str, Any]) -> str:
        try:
            return self._template.format_map(values)
        except KeyError as error:
            raise ValueError(
                f"reward.judge.template names {{{error.args[0]}}}, which is no column of the prompts. There "
                f"are {', '.join(sorted(values))}. Braces that name nothing are doubled."
            ) from error

    async def _verdict(self, text: str) -> _Verdict:
        key = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        task = self._asked.get(key)
        if task is None:
            while len(self._asked) >= _CACHE_SIZE:
                del self._asked[next(iter(self._asked))]
            task = self._asked[key] = asyncio.create_task(self._ask(text))
            task.add_done_callback(functools.partial(self._forget_failed, key))
        # Other groups may wait for the same request when this one is cancelled.
        return await asyncio.shield(task)

    def _forget_failed(self, key: bytes, task: asyncio.Task[_Verdict]) -> None:
        if (task.cancelled() or task.exception()) and self._asked.get(key) is task:
            del self._asked[key]

    async def _ask(self, text: str) -> _Verdict:
        verdict: _Verdict | RouteError | None = None
        for i in range(self._settings.retries + 1):
            if i:
                await asyncio.sleep(min(_FIRST_PAUSE_SECONDS * 2**i, _LONGEST_PAUSE_SECONDS))
            try:
                verdict = await self._ask_once(text)
            except RouteError as error:
                if error.is_refusal:
                    raise
                verdict = error
                continue
            if verdict.score is not None:
                return verdict
        if isinstance(verdict, RouteError):
            raise ScoreLater(str(verdict)) from verdict
        assert verdict is not None, "there was a request"
        return verdict

    async def _ask_once(self, text: str) -> _Verdict:
        route = "/chat/completions"
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        if self._settings.kind == "score":
            # vLLM takes the input, and whether to apply a sigmoid to the output; SGLang the text.
            route, body = "/classify", {"input": text, "text": text, "use_activation": False}
        if self._settings.model:
            body["model"] = self._settings.model
        async with self._places:
            answer = await self._http.post(
                route,
                body | self._settings.options,
                scope="generation",
                max_bytes=_MAX_ANSWER_BYTES,
            )
        return self._read(answer.body)

    def _read(self, body: Any) -> _Verdict:
        try:
            if self._settings.kind == "score":
                # Of vLLM, and of SGLang.
                values = body["data"][0]["probs"] if "data" in body else body["embedding"]
                if len(values) != 1:
                    raise RuntimeError(
                        "reward.judge.url must serve a reward model with one output, got one with "
                        f"{len(values)}."
                    )
                return _Verdict(_usable(values[0]), "")
            choice = body["choices"][0]
            answer = choice["message"]["content"]
            is_cut = (reason := choice.get("finish_reason")) not in _FINISHED
        except (KeyError, IndexError, TypeError) as error:
            # Perhaps the page of a proxy, or of another server at a wrong URL.
            raise RouteError(
                f'{self._http.url} must answer as reward.judge.kind = "{self._settings.kind}" says, got '
                f"{excerpt(body)}"
            ) from error
        if not isinstance(answer, str):  # cut while it still thought, or given in parts
            return _Verdict(None, str(body)[:_KEPT_CHARS])
        said = answer[-_SEARCHED_CHARS:].rpartition("</think>")[2].partition("<think>")[0]
        if self._score is None:
            score = written_score(said, is_cut=is_cut)
        else:
            last = deque(self._score.finditer(said), maxlen=1)
            score = found_score(last[0], is_cut=is_cut) if last else None
        return _Verdict(_usable(score), answer[-_KEPT_CHARS:] + f" (cut: {reason!r})" * is_cut)


def _usable(number: float | None) -> float | None:
    """``None`` for NaN, infinity, and what is too large for a reward."""
    return number if number is not None and abs(number) <= LARGEST_REWARD else None


def _prompt_text(prompt: Any) -> str:
    """The text of a prompt: of several messages, with the role before each."""
    if isinstance(prompt, str):
        return prompt
    said = [(message["role"], _joined(message["content"])) for message in prompt]
    if len(said) == 1:
        return said[0][1]
    return "\n\n".join(f"{role}: {text}" for role, text in said)


def _joined(content: Any) -> str:
    """The text of a message, which may be a list of parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _proxy_for(url: str) -> str | None:
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if proxy is None or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
