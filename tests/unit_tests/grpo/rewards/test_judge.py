# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A judge on a real server that is slow, hangs, drops connections, and answers nonsense."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from aiohttp import web
from reward_pools import reward_pool
from stub_clients import answering, serving

from torchtitan.grpo.config import Judge as Settings
from torchtitan.grpo.config import Reward, Workers
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.rewards import ScoreLater, scoring_pool
from torchtitan.grpo.rewards.judge import Judge
from torchtitan.grpo.rewards.reward_loading import RewardLog
from torchtitan.grpo.rewards.scoring_pool import RewardError, RewardPool, ScoringFailed
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.types import Prompt

PROMPT = Prompt(0, "2+2=", np.array([1], np.int32), {"answer": "4"})


@dataclass
class Server:
    """Answers with ``answer``, which gets the text that is to be judged."""

    answer: Callable[[str], Awaitable[Any]]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append({"path": request.path, **body})
        self.keys.append(request.headers.get("Authorization"))
        answer = await self.answer(body["messages"][0]["content"] if "messages" in body else "")
        if answer is None:
            assert request.transport is not None
            request.transport.close()
        if isinstance(answer, str):
            answer = {"choices": [{"message": {"content": answer}}]}
        if isinstance(answer, int):
            return web.Response(status=answer, text="says why")
        return web.json_response(answer)

    @property
    def settings(self) -> Settings:
        return Settings(url=f"{self.url}/v1", model="m", template="{completion}", retries=1)


@contextlib.asynccontextmanager
async def judging(
    answer: Callable[[str], Awaitable[Any]] | Any, port: int = 0
) -> AsyncIterator[Server]:
    async def given(text: str) -> Any:
        return answer

    server = Server(answer if callable(answer) else given)
    async with serving(server.handle, port) as server.url:
        yield server


@contextlib.asynccontextmanager
async def started_pool(
    settings: Settings, drops: DropLog | None = None, function: str = "judge", **workers: Any
) -> AsyncIterator[RewardPool]:
    reward = Reward(judge=settings, timeout_seconds=20.0)
    on_failure = (drops or DropLog(lambda text: None)).record_scoring
    given = {"workers": Workers(**workers), "on_failure": on_failure}
    async with reward_pool([function], reward, **given) as pool:
        yield pool


async def ask(settings: Settings, *completions: Any, prompt: Any = "", **columns: Any) -> Any:
    """Asks a judge in this process; returns its scores and the share of unreadable ones."""
    judge, log = Judge(settings, 20.0), RewardLog(len(completions))
    prompts = [prompt] * len(completions)
    every = {name: [value] * len(completions) for name, value in columns.items()}
    try:
        scores = await judge(
            prompts, completions, log_metric=log.log_metric, log_extra=log.log_extra, **every
        )
    finally:
        await judge._http.close()
    return scores, log.metrics["judge_unreadable"]


async def test_the_requests_of_all_groups_are_with_the_judge_at_once():
    all_here, texts = asyncio.Event(), set[str]()

    async def answer(text: str) -> str:
        texts.add(text)
        if len(texts) == 6:
            all_here.set()
        await all_here.wait()
        return f"Score: {text}"

    async with judging(answer) as server, started_pool(server.settings) as pool:
        groups = [[str(2 * i), str(2 * i + 1)] for i in range(3)]
        found = await asyncio.gather(*(pool.score(PROMPT, g, [[1], [2]]) for g in groups))
    assert [scored.values for scored in found] == [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0, 5.0]]]
    assert found[0].extra == {"judge": ["Score: 0", "Score: 1"]}


async def test_no_more_requests_than_allowed_are_sent_and_equal_ones_once():
    in_flight, most = 0, 0

    async def answer(text: str) -> str:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.01)
        in_flight -= 1
        return text

    async with judging(answer) as server:
        settings = replace(server.settings, max_concurrent=2)
        scores, _ = await ask(settings, *"1123321")
    assert scores == [1.0, 1.0, 2.0, 3.0, 3.0, 2.0, 1.0]
    assert most == 2 and len(server.bodies) == 3


ANSWERS = {
    "8": 8.0, "Score: 8": 8.0, "**8/10**": 8.0, "First 3, then:\n7.5 out of 10.": 7.5, "First 3, then 7.5 out of 10.": None, "-1": -1.0,
    "[[7]]": 7.0, "1-10: 7": None, "0.25": 0.25, "step 1.": None, "I use gpt4.": None, "": None,
    "<think>Perhaps 3.</think>8": 8.0, "<think>Perhaps 3.": None, "<think>Perhaps 3.</think>": None,
}  # fmt: skip


UNFINISHED = {
    "Step 1 is right. In step 2 the student": None, "8": None, "8\n": None, "Score: 1": None, "Score: 8.": None,
    "Score: 7 to": None, "Score: 7 to 8\n": None, "Score: I would say 8\n": None, "\\boxed{8": None, "<score>8": None,
    "Score: 8\nThe student": 8.0, "**Score: 8/10**\n\nThe": 8.0, "[[8]]": 8.0, "<score>8</score>": 8.0,
}  # fmt: skip


@pytest.mark.parametrize("reason", ["length", "content_filter", "abort"])
async def test_an_answer_that_was_cut_is_read_only_behind_a_mark(reason: str):
    async def answer(text: str) -> Any:
        return {"choices": [{"message": {"content": text}, "finish_reason": reason}]}

    async with judging(answer) as server:
        settings = replace(server.settings, retries=2)
        assert (await ask(settings, *UNFINISHED))[0] == list(UNFINISHED.values())
        number = sum(3 if score is None else 1 for score in UNFINISHED.values())
        assert len(server.bodies) == number, "what is unreadable is asked again"
        expression = replace(settings, score=r"Score: (\d+)")
        assert (await ask(expression, "Score: 1", "Score: 1\n"))[0] == [None, 1.0]
        expression = replace(settings, score=r"Points: (\d+)")
        for rest in (".", ",", "-", "e", " to", "", " "):
            assert (await ask(replace(expression, retries=0), f"Points: 8{rest}"))[0] == [None]
        assert (await ask(expression, "Points: 8\n"))[0] == [8.0]


EXPRESSIONS = [
    (r"Score: (\d+)", "Score: 7.5", None), (r"Score: (\d+)", "Score: 7,5", None), (r"Score: (\d+)", "Score: 7½", None),
    (r"Score: (\d+)", "Score: 1e1", None), (r"Score: (\d+)", "Score: 7-8", None), (r"Score:.*?(\d+)", "Score: -3", None),
    (r"Score:.*?(\d+)", "Score: −3", None), (r"(\d)\b", "10", None), (r"Score: (\d+)", "Score: 8/10", 8.0),
    (r"(\d+)/10", "8/10", 8.0), *[
        (r"Points: (\d+)", "Points: " + said, None)
        for said in ["1 000", "1\u202f000", "1_000", "1{,}000", "8 1/2", "8²", "8^2", "8*10", "8e−1", "8．5", "8，5", "8 ½", "8 to 9"]
    ], *[(r"(\d+)/10", said, None) for said in ("1 000/10", "7-8/10", "1e1/10", "1,5/10")],
    (r"(\d+)%", "80%", 80.0), (r"Score: (\S+)", "Score: −3", -3.0),
    (r"Score: (\S+)", "Score: 8/10", 8.0), (r"Score: (\S+)", "Score: eight", None), (r"Score: (\d+)?", "Score: ?", None),
    (r"score-(\d+)", "score-8", 8.0), (r"(\d+)pts", "8pts", 8.0), (r"Score: (\d+)", "Score: 8.", 8.0),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "answer", "score"), EXPRESSIONS)
async def test_an_expression_does_not_read_a_part_of_a_number(expression, answer, score):
    async with judging(answer) as server:
        assert (await ask(replace(server.settings, score=expression), "a"))[0] == [score]


async def test_the_score_is_the_last_number_or_what_an_expression_finds():
    async def answer(text: str) -> str:
        return text

    async with judging(answer) as server:
        scores, unreadable = await ask(server.settings, *ANSWERS)
        assert scores == list(ANSWERS.values())
        assert unreadable == 7 / len(ANSWERS)
        one_to_five = replace(server.settings, score=r"verdict=([1-5])\b")
        scores, _ = await ask(one_to_five, "verdict=2 verdict=4 of 9", "verdict=7")
        assert scores == [4.0, None]


async def test_an_answer_without_a_score_is_no_value_after_the_last_request():
    async with judging("no number") as server:
        assert await ask(replace(server.settings, retries=2), "a") == ([None], 1.0)
    assert len(server.bodies) == 3


OK = b"HTTP/1.1 200 OK\r\n"


def whole(body: bytes) -> list[bytes]:
    return [OK + b"Content-Length: %d\r\n\r\n" % len(body), body]


def said(content: bytes) -> bytes:
    return b'{"choices": [{"message": {"content": %s}}]}' % content


NO_ANSWER = "must answer as reward.judge.kind = "
# What a judge of each kind sends, and the scores or the error that it comes to.
HOSTILE: dict[str, tuple[str, list[bytes], list[float | None] | tuple[type[Exception], str]]] = {
    "4 MB of numbers": ("chat", whole(said(b'"%sScore: 8"' % (b"1 " * 2_000_000))), [8.0]),
    "4 MB of spaces": ("chat", whole(said(b'"8%s9"' % (b" " * 4_000_000))), [9.0]),
    "another type": ("chat", [OK + b"Content-Type: text/html\r\n", b"\r\n" + said(b'"8"')], [8.0]),
    "no content": ("chat", whole(said(b"null")), [None]),
    "a list as content": ("chat", whole(said(b"[8]")), [None]),
    "NaN in words": ("chat", whole(said(b'"NaN"')), [None]),
    "400 digits": ("chat", whole(said(b'"%s"' % (b"9" * 400))), [None]),
    "13 digits": ("chat", whole(said(b'"Score: 1000000000001"')), [None]),
    "a score long before the end": ("chat", whole(said(b'"8%s"' % (b" " * 2**16))), [None]),
    "NaN": ("score", whole(b'{"embedding": [NaN]}'), [None]),
    "infinity": ("score", whole(b'{"data": [{"probs": [-Infinity]}]}'), [None]),
    "a huge integer": ("score", whole(b'{"embedding": [1%s]}' % (b"0" * 400)), [None]),
    "a huge number": ("score", whole(b'{"embedding": [1e300]}'), [None]),
    "no number": ("score", whole(b'{"embedding": ["x"]}'), (ScoreLater, NO_ANSWER)),
    "a page": ("chat", whole(b"<html>8</html>"), (ScoreLater, NO_ANSWER + '"chat" .*, got <html>')),
    "an error": ("chat", whole(b'{"error": {"code": 429}}'), (ScoreLater, NO_ANSWER)),
    "no choices": ("chat", whole(b'{"choices": []}'), (ScoreLater, NO_ANSWER)),
    "a list": ("chat", whole(b"[]"), (ScoreLater, NO_ANSWER)),
    "nothing": ("chat", whole(b""), (ScoreLater, NO_ANSWER)),
    "brackets": ("chat", whole(b"[" * 100_000), (ScoreLater, NO_ANSWER)),
    "no text": ("chat", whole(b"\xff\xfe"), (ScoreLater, "must be answered in UTF-8")),
    "no HTTP": ("chat", [b"hello\r\n\r\n"], (ScoreLater, "failed: ClientResponseError")),
    "100 MB": (
        "chat", [OK + b"\r\n", *[b" " * 2**20] * 100], (ScoreLater, "with at most 4194304 bytes"),
    ),
    "headers without end": (
        "chat", [OK, *[b"X: y\r\n" * 1000] * 1000], (ScoreLater, "Too many headers"),
    ),
    "a header without end": (
        "chat", [OK + b"X: ", *[b"y" * 10_000] * 1000], (ScoreLater, "more than 8190 bytes"),
    ),
    "another address": (
        "chat", [b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://x/\r\n\r\n"],
        (RouteError, "a redirection to 'http://x/', which is not followed"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_whatever_a_judge_sends_is_a_score_or_none_or_an_error_that_names_it(name: str):
    kind, parts, expected = HOSTILE[name]
    async with answering(parts) as (url, seen):
        settings = Settings(kind=kind, url=url, model="m", template="{completion}", retries=0)  # pyright: ignore
        if isinstance(expected, list):
            assert (await ask(settings, "a"))[0] == expected
        else:
            with pytest.raises(expected[0], match=expected[1]):
                await ask(settings, "a")
    assert len(seen) == 1


async def test_a_judge_that_is_started_again_at_its_address_scores_the_groups_that_wait(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(scoring_pool, "_PAUSES_SECONDS", (0.1,) * 1000)
    async with judging("7") as server:
        settings = replace(server.settings, retries=0)
    async with started_pool(settings) as pool:
        scoring = [asyncio.create_task(pool.score(PROMPT, [a], [[1]])) for a in "abc"]
        while not pool.describe().startswith("3 groups wait"):
            await asyncio.sleep(0.01)
        async with judging("7", urlsplit(server.url).port or 0):
            assert [scored.values for scored in await asyncio.gather(*scoring)] == [[[7.0]]] * 3


@pytest.mark.parametrize("failure", [None, 503, 429, "hang"])
async def test_a_judge_that_is_lost_is_asked_again_and_then_its_group_is_scored_later(
    failure: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scoring_pool, "_PAUSES_SECONDS", (0.0, 0.0))
    num_left = 3  # one attempt of the group fails, and one request of the second

    async def answer(text: str) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            return "7"
        if failure == "hang":
            await asyncio.sleep(1000)
        return failure

    drops = DropLog(lambda text: None)
    async with judging(answer) as server:
        settings = replace(server.settings, timeout_seconds=4.0 if failure == "hang" else 20.0)
        async with started_pool(settings, drops) as pool:
            assert (await pool.score(PROMPT, ["a"], [[1]])).values == [[7.0]]
            assert (drops.counts["reward postponed"], len(server.bodies)) == (1, 4)
            if failure == "hang":
                return  # takes long
            num_left = 100
            with pytest.raises(ScoringFailed, match=r"'judge' cannot be computed now: POST http"):
                await pool.score(PROMPT, ["b"], [[1]])
            with pytest.raises(RewardError, match=r"computed now: .*checked before training"):
                await pool.check(PROMPT)
    assert (drops.counts["reward postponed"], len(server.bodies)) == (4, 4 + 6 + 2)


async def test_a_judge_that_is_slower_than_the_limit_of_a_group_keeps_what_it_has_answered():
    release = asyncio.Event()

    async def answer(text: str) -> str:
        if text == "2":
            await release.wait()
        return text

    async with judging(answer) as server:
        judge, log = Judge(replace(server.settings, timeout_seconds=20.0), 1.0), RewardLog(2)
        logs = {"log_metric": log.log_metric, "log_extra": log.log_extra}
        with pytest.raises(
            ScoreLater, match=r"within 0\.9 s \(reward.timeout_seconds\), with at most 64 requests"
        ):
            await judge(["", ""], ["1", "2"], **logs)
        release.set()
        assert await judge(["", ""], ["1", "2"], **logs) == [1.0, 2.0]
        await judge._http.close()
    assert len(server.bodies) == 2


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_judge_that_refuses_is_not_asked_again(status: int):
    async with judging(status) as server, started_pool(server.settings) as pool:
        message = rf"'judge' raised RouteError: POST .* answered {status}: says why"
        with pytest.raises(RewardError, match=message) as failed:
            await pool.check(PROMPT)
        assert ("reward.judge.api_key_variable" in str(failed.value)) == (status == 401)
    assert len(server.bodies) == 1


async def test_the_template_takes_columns_and_messages_and_may_be_a_file(tmp_path: Path):
    template = 'Q: {prompt}\nA: {completion}\nRight: {answer}\nReply {{"score": N}}'
    (file := tmp_path / "template.txt").write_text(template)
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}
    async with judging("1") as server:
        settings = replace(server.settings, template=str(file), options={"temperature": 0.0})
        written = [{"role": "assistant", "content": "four"}]
        parts = user | {"content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+2"}]}
        for prompt in ("2+2", [user], [system, user], [parts], [system, parts]):
            await ask(settings, written if prompt != "2+2" else "four", prompt=prompt, answer=4)
        with pytest.raises(
            ValueError, match=r"names {answer}, which is no column .* completion, prompt"
        ):
            await ask(settings, "four")
    texts = [body["messages"][0]["content"] for body in server.bodies]
    rest = '\nA: four\nRight: 4\nReply {"score": N}'
    assert sorted(set(texts)) == [f"Q: 2+2{rest}", f"Q: system: Be brief.\n\nuser: 2+2{rest}"]
    assert server.bodies[0] | {"messages": []} == {
        "path": "/v1/chat/completions", "model": "m", "messages": [], "temperature": 0.0,
    }  # fmt: skip


REWARD_MODELS = {
    "vllm": ({"data": [{"index": 0, "label": None, "probs": [-1.5], "num_classes": 1}]}, [-1.5]),
    "sglang": ({"embedding": [2.25], "meta_info": {}}, [2.25]),
}


@pytest.mark.parametrize(("answer", "scores"), REWARD_MODELS.values(), ids=REWARD_MODELS)
async def test_a_reward_model_gives_its_output(answer: Any, scores: list[float | None]):
    async with judging(answer) as server:
        settings = replace(
            server.settings, url=server.url, kind="score", template="<u>{completion}"
        )
        found, _ = await ask(settings, "four")
    assert found == scores
    assert server.bodies[0] == {
        "path": "/classify", "input": "<u>four", "text": "<u>four", "use_activation": False,
        "model": "m",
    }  # fmt: skip


async def test_a_model_with_several_outputs_is_no_reward_model():
    async with judging({"embedding": [0.5, 0.5]}) as server:
        with pytest.raises(RuntimeError, match="a reward model with one output, got one with 2"):
            await ask(replace(server.settings, url=server.url, kind="score"), "four")


async def test_the_key_and_proxies_reach_the_worker_by_name_alone(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    names = ["JUDGE_KEY", "*_proxy", "*_PROXY"]
    async with judging("1") as server:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, server.url)
        # Nothing listens at the address itself.
        settings = replace(server.settings, url="http://127.0.0.1:9/v1", api_key_variable=names[0])
        for passed, without_proxy, reached in (
            (names, "elsewhere", True), (names, "127.0.0.1", False), (names[:1], "elsewhere", False),
        ):  # fmt: skip
            for name in ("no_proxy", "NO_PROXY"):
                monkeypatch.setenv(name, without_proxy)
            async with started_pool(settings, pass_variables=passed) as pool:
                if reached:
                    assert await pool.check(PROMPT) == [1.0]
                    continue
                with pytest.raises(RewardError, match=r"9/v1/chat.* failed: ClientConnectorError"):
                    await pool.check(PROMPT)
        with pytest.raises(RewardError, match=r"names JUDGE_KEY, which must be set in the env"):
            async with started_pool(settings):
                pytest.fail("the pool must not start")
    assert server.keys == ["Bearer secret"]


async def test_the_judge_of_ones_own_on_the_page_works_and_waits_for_its_server(
    repository: Path, tmp_path: Path
):
    page = (repository / "docs/how-to/judges.md").read_text()
    code = page.partition("# my_judge.py\n")[2].partition("```")[0]

    async def answer(text: str) -> str:
        return "Yes." if "\n\nfour\n\n" in text else "No."

    file = tmp_path / "my_judge.py"
    async with judging(answer) as server:
        file.write_text(code.replace("http://127.0.0.1:8500", server.url))
        async with started_pool(Settings(), function=f"{file}:approved") as pool:
            scored = await pool.score(PROMPT, ["four", "five"], [[1], [2]])
    assert (scored.values, scored.metrics) == ([[1.0, 0.0]], {"approved_by_all": 0.0})
    async with started_pool(Settings(), function=f"{file}:approved") as pool:
        with pytest.raises(RewardError, match=r"cannot be computed now: http.* does not answer"):
            await pool.check(PROMPT)
