# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A proxy in front of an embedded server that forwards everything and spoils some completions.

It spoils the answers of a real server, so everything except the spoiled part is correct.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web
from proxy import Answer, Proxy

NO_TOKEN = 4242  # beyond the vocabulary of the models that tests use
_MIB = 2**20
_ENDLESS_BYTES = 256 * _MIB
# How long an answer waits for another one to be swapped with.
_PARTNER_SECONDS = 2.0

Fields = dict[str, Any]


def _first_token(token: int) -> Callable[[Fields], None]:
    def change(answer: Fields) -> None:
        answer["output_ids"][0] = token
        answer["meta_info"]["output_token_logprobs"][0][1] = token

    return change


def _first_logprob(logprob: Any) -> Callable[[Fields], None]:
    def change(answer: Fields) -> None:
        answer["meta_info"]["output_token_logprobs"][0][0] = logprob

    return change


def _with_one_more_logprob(answer: Fields) -> None:
    logprobs = answer["meta_info"]["output_token_logprobs"]
    logprobs.append(logprobs[-1])


def _without_first_version(answer: Fields) -> None:
    answer["meta_info"]["weight_versions"][0]["start"] += 1


def _of_no_version(answer: Fields) -> None:
    for segment in answer["meta_info"]["weight_versions"]:
        segment["version"] = "999999"


def _of_a_cut_prompt(answer: Fields) -> None:
    answer["meta_info"]["prompt_tokens"] -= 1


def _too_long(answer: Fields) -> None:
    meta, more = answer["meta_info"], 1000
    answer["output_ids"] += answer["output_ids"][-1:] * more
    meta["output_token_logprobs"] += meta["output_token_logprobs"][-1:] * more
    meta["completion_tokens"] += more
    meta["weight_versions"][-1]["end"] += more


# What becomes of an answer's fields, and what becomes of its bytes.
_CHANGES: dict[str, Callable[[Fields], None]] = {
    "out-of-vocabulary id": _first_token(NO_TOKEN),
    "logprob too many": _with_one_more_logprob,
    "NaN logprob": _first_logprob(float("nan")),
    "clipped logprob": _first_logprob(-9999.0),
    "version gap": _without_first_version,
    "version of the future": _of_no_version,
    "cut prompt": _of_a_cut_prompt,
    "too many tokens": _too_long,
}
_REPLACEMENTS: dict[str, Callable[[bytes], bytes]] = {
    "truncated JSON": lambda body: body[: len(body) // 2],
    "no UTF-8": lambda body: body.replace(b"{", b'{"\xff\xfe": 0, ', 1),
    "deep JSON": lambda _: b"[" * 200_000,
    "HTML": lambda _: b"<html><body><h1>Welcome to the gateway</h1></body></html>",
    "empty": lambda _: b"",
}
# What is no answer of its own, or none at all.
_OTHERS = ("previous answer", "swapped", "hang", "cut connection", "no HTTP", "endless")
MODES = (*_CHANGES, *_REPLACEMENTS, *_OTHERS)


class CorruptingProxy(Proxy):
    def __init__(
        self,
        target: str,
        *,
        every: int,
        is_doomed: Callable[[list[int]], bool],
    ) -> None:
        self.spoiled: Counter[str] = Counter()
        self.num_given_up = 0  # requests whose client went before there was an answer to spoil
        self.num_endless_bytes = 0
        super().__init__(target)
        self._every, self._is_doomed = every, is_doomed
        self._num_answers = self._num_turns = 0
        self._previous: bytes | None = None
        # An answer that waits for another one with which it is swapped.
        self._waiting: tuple[bytes, asyncio.Future[bytes]] | None = None

    def on_given_up(self, request: web.Request) -> None:
        self.num_given_up += request.path == "/generate"

    async def on_answer(
        self, request: web.Request, sent: bytes, answer: Answer
    ) -> web.StreamResponse | None:
        fields = json.loads(sent) if request.path == "/generate" and answer.status == 200 else {}
        if not fields or fields["sampling_params"]["max_new_tokens"] == 0:
            return None
        mode = self._next_mode(fields["input_ids"])
        previous, self._previous = self._previous, answer.body
        return None if mode is None else await self._spoil(request, mode, answer.body, previous)

    def _next_mode(self, prompt_ids: list[int]) -> str | None:
        self._num_answers += 1
        if self._num_answers % self._every and not self._is_doomed(prompt_ids):
            return None
        mode = MODES[self._num_turns % len(MODES)]
        self._num_turns += 1
        return mode

    async def _spoil(
        self, request: web.Request, mode: str, body: bytes, previous: bytes | None
    ) -> web.StreamResponse:
        if mode in _CHANGES:
            answer = json.loads(body)
            _CHANGES[mode](answer)
            spoiled = json.dumps(answer).encode()
        elif mode in _REPLACEMENTS:
            spoiled = _REPLACEMENTS[mode](body)
        elif mode == "previous answer":
            spoiled = previous or body
        elif mode == "swapped":
            spoiled = await self._swap(body)
        else:
            self.spoiled[mode] += 1
            return await self._misbehave(request, mode, body)
        self.spoiled[mode] += spoiled != body
        kind = "text/html" if mode == "HTML" else "application/json"
        return web.Response(body=spoiled, content_type=kind)

    async def _swap(self, body: bytes) -> bytes:
        partner, self._waiting = self._waiting, None
        if partner is not None and not partner[1].done():
            partner[1].set_result(body)
            return partner[0]
        other: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting = body, other
        try:
            async with asyncio.timeout(_PARTNER_SECONDS):
                return await other
        except TimeoutError:
            return body
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise

    async def _misbehave(self, request: web.Request, mode: str, body: bytes) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        if mode == "hang":
            await asyncio.get_running_loop().create_future()  # until the client goes
        if mode == "no HTTP":
            transport.write(b"\x16\x03\x01 This is no HTTP.\r\n\r\n")
            transport.close()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        if mode == "cut connection":
            response.content_length = len(body)
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            transport.close()
        if mode == "endless":
            await response.prepare(request)
            await self._write_endlessly(response)
        return response

    async def _write_endlessly(self, response: web.StreamResponse) -> None:
        num_bytes, chunk = 0, b" " * _MIB
        while num_bytes < _ENDLESS_BYTES:
            try:
                await response.write(chunk)
            except ConnectionError:
                return
            num_bytes += len(chunk)
            self.num_endless_bytes = max(self.num_endless_bytes, num_bytes)
