# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The built-in reward function ``judge``, which asks a model on a server; see `config/judge.py`.

Only a number in a known form counts as a score. It follows the last mark, such as ``Score:``, or,
if there is no mark, stands alone in the last line. It may have a unit, the best possible score and
an aside, as in ``8 points out of 10 (80%)``, and must end its line or sentence. All regular
expressions take time in proportion to the text's length.
"""

import asyncio
import functools
import hashlib
import os
import re
import time
import unicodedata
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
from torchtitan.grpo.system import spans

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
    """A judge's ``answer``, and the ``score`` that it contains, or ``None``."""

    score: float | None
    answer: str


class Judge:
    """Scores completions by asking a judge model, in one event loop.

    Verdicts are cached, so that equal requests are sent once. ``limit_seconds`` is the time in which a
    whole group must be scored.
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
            with spans.span("judge", "judge"):
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
    """Returns the number, or ``None`` if it is NaN, infinite or too large for a reward."""
    return number if number is not None and abs(number) <= LARGEST_REWARD else None


def _prompt_text(prompt: Any) -> str:
    """The text of a prompt. If it has several messages, the role precedes each."""
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


_CHARACTERS = str.maketrans("−－﹣＋⁄∕／：，．٫（）％’", "---+///:,.,()%'", "\u200b\u2060\ufeff")
# Quotes and Markdown, which say nothing unless they stand within a word or a number.
_DECORATION = re.compile(r"(?<!\w)[*_`\"'“”$]+|[*_`\"'“”$]+(?!\w)|\\[()\[\]]|\\text\w{0,2}(?=\{)")
_TAGS = [(re.compile(r"</\w{1,20}>"), "\n"), (re.compile(r"<([A-Za-z]\w{0,20})>"), r"\1: "),
         (re.compile(r"<(\d[\d.]{0,20})>"), r"\1")]  # fmt: skip

# `Max score: 10` and `Verdict: right` are no marks.
_MARK = re.compile(
    r"(?P<other>(?:max|maximum|possible|highest|full|perfect|best|top) )?(?<![\w/])"
    r"(?:scores?|评分|得分|(?:rating|verdict|grade)(?!\W{0,4}[:=>]\W{0,4}[^\W\d_]))[\])]? ?[:=>]{1,2}"
    r"|\[\[(?=[^\[\]\n]{1,20}\]\])|\\boxed ?\{",
    re.IGNORECASE,
)
_NUMBER = r"\d++(?:\.\d++)?+"
_UNIT = r"(?: {1,3}(?:points?|stars?|marks?|pts)\b| ?分(?![半钟之]))?"
_BEST = rf"(?: ?\\?/ ?| (?:out )?of (?:the |an? )?(?:possible )?(?:max\.? )?|(?:[,;]| -)? max:? ){_NUMBER}{_UNIT}"
_WITHIN = rf"(?:scale|of|from|to|out|max|满分|[-–:/ ]|{_NUMBER} ?[%分]?)"
_ASIDE = rf"(?: ?\({_WITHIN}{{1,12}}\)|, ?{_NUMBER} ?%| on a scale {_WITHIN}{{1,8}})"
_SCORE = re.compile(
    rf"[ (\[{{]*+(?P<score>[-+]?(?:{_NUMBER}|\.\d++)(?:e[-+]?\d{{1,3}}+)?+)"
    rf"{_UNIT}(?:[)\]}}]?{_BEST})?{_ASIDE}{{0,2}}",
    re.IGNORECASE,
)
# What may follow a score: the end of brackets, a further key of JSON, the end of the line, or a sentence
# without numbers. Where an answer was cut, the number may go on where only the text has ended.
_CLOSED = re.compile(r"[ )]*(?:\]\]|\}| ?, ?\w{1,60} ?:[^\n]*\})(?!\s*\\?(?:[%/^\d]|per ?cent))")
_ENDED = re.compile(r"[ )\]}|>]*+(?:[.;!。][ )\]}]*+)?(?P<open>\n|\Z)")
_SENTENCE = re.compile(
    r"[ )\]}]*+(?:[.;!。]\s*+[^\W\d]|,? ?(?:since|because)\b)[^\d\n]*+(?P<open>\n|\Z)",
    re.IGNORECASE,
)
# A number goes on behind, or has begun before, what an expression of the user's has found.
_GOES_ON = re.compile(
    r" ?[-–—~*×·^_+]+ ?\{?\d|(?:[.,'/:]|\{,\}|\\[,:; ])?(?<!/)\d|\\?\^|e[-+]?\d"
    r"| (?:\d{3}(?!\d)|\d+/\d|(?:to|or) \d|\^|and (?:an?|1) )",
    re.IGNORECASE,
)
_HAS_BEGUN = re.compile(r"\d(?:[.,'_/]| ?[-–—~*^] ?|e[-+]?)?$|(?<![\w)])[-–—]$", re.IGNORECASE)


def written_score(answer: str, *, is_cut: bool) -> float | None:
    """Returns the score in an answer, or ``None``. If it ``is_cut``, only a score after a mark counts."""
    text = _understood(answer)
    for tag, plain in _TAGS:
        text = tag.sub(plain, text)
    text = _DECORATION.sub("", text)
    marks = list(_MARK.finditer(text))
    ends = [mark.end() for mark in marks if not mark["other"]]
    if not ends:
        return None if marks or is_cut else _read(text.strip().rpartition("\n")[2], 0, is_cut)
    below = re.compile(r"\s*\n\s*").match(text, ends[-1])
    return _read(text, below.end() if below else ends[-1], is_cut, may_go_on=below is None)


def _read(text: str, start: int, is_cut: bool, may_go_on: bool = False) -> float | None:
    """Reads the score at ``start``. With ``may_go_on``, a sentence may follow the score on its line."""
    score = _SCORE.match(text, start)
    if score is None:
        return None
    if _CLOSED.match(text, score.end()) is None:
        ended = _ENDED.match(text, score.end())
        ended = ended or (_SENTENCE.match(text, score.end()) if may_go_on else None)
        if ended is None or (is_cut and not ended["open"]):
            return None
    return float(score["score"])


def found_score(found: re.Match[str], *, is_cut: bool) -> float | None:
    """Reads the score that the user's regular expression found, unless it is a part of a longer number."""
    text, (start, end) = found.string, found.span(1)
    before, rest = _understood(text[max(0, start - 8) : start]), _understood(text[end : end + 200])
    may_go_on = is_cut and not (_CLOSED.match(rest) or re.match(r"[^\w\n]*\n", rest))
    if text[end : found.end()].strip(" .,"):  # the expression says what follows
        may_go_on = is_cut and found.end() == len(text) and text[-1].isalnum()
    elif _GOES_ON.match(rest):
        return None
    is_group = re.fullmatch(r"\d [0-9]{3}", before[-2:] + (found[1] or ""))
    if start < 0 or is_group or may_go_on or _HAS_BEGUN.search(before):
        return None
    score = _SCORE.fullmatch(_understood(found[1].strip()).rstrip("."))
    return float(score["score"]) if score is not None else None


def _understood(text: str) -> str:
    """Normalizes blanks and signs. ``½``, ``²`` and ``Ⅷ`` become ``^0``, which is part of no score."""
    text = re.sub(r"(?<=\d)[\u200b-\u200d\u2060\ufeff]+(?=\d)", "^", text).translate(_CHARACTERS)
    text = re.sub(r"[^\S\n]+", " ", text)
    return "".join("^0" if unicodedata.category(c) in ("No", "Nl") else c for c in text)
