# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ratings from teachers in this process that are slow, lost, restarted, or others than before."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import rollouts
from stub_clients import StubClient
from tokenizers import Tokenizer, models

from torchtitan.grpo.config import Teacher
from torchtitan.grpo.config.teacher import MAX_TOP_K
from torchtitan.grpo.inference.client import (
    MAX_TOP_TOKENS,
    Capabilities,
    PromptRating,
    ServerFacts,
)
from torchtitan.grpo.inference.http import RouteError
from torchtitan.grpo.inference.join_check import WrongServer
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.teachers import (
    NotRated,
    TeacherNeeds,
    TeacherPool,
    TeachersFailing,
    Unrated,
    teacher_pool,
)
from torchtitan.grpo.rollout.teachers.teacher_check import MOST_FURTHER_TOKENS
from torchtitan.grpo.rollout.teachers.teacher_pool import request_parts
from torchtitan.grpo.types import Rollout, TopTokens

PROMPT, COMPLETION = np.array([3, 4], np.int32), np.array([5, 6, 7], np.int32)
Answer = Callable[[list[int]], Awaitable[list[float]]]


def rating_of(token_ids: list[int], offset: float = 0.0) -> list[float]:
    return [-float(token) - offset for token in token_ids[1:]]


async def refuse(token_ids: list[int]) -> list[float]:
    raise RouteError("POST http://t failed: connection refused")


async def rate_otherwise(token_ids: list[int]) -> list[float]:
    return rating_of(token_ids, offset=1.0)


class LocalTeacher(StubClient):
    """Rates a token by its number; ``answer`` replaces it for other behavior."""

    def __init__(self, facts: ServerFacts, url: str = "http://t") -> None:
        self.url, self.facts = url, facts
        self.answer: Answer = self.by_number
        self.num_requests = self.num_at_once = self.most_at_once = 0
        self.sizes: list[int] = []
        self.num_tops: set[int] = set()
        self.best = list(range(20))  # its most likely tokens, wherever it is asked

    async def by_number(self, token_ids: list[int]) -> list[float]:
        return rating_of(token_ids)

    async def rate(
        self, sequences: Sequence[list[int]], starts: Sequence[int], num_top: int = 0
    ) -> list[PromptRating]:
        self.sizes.append(len(sequences))
        self.num_tops.add(num_top)
        ratings = []
        for token_ids, start in zip(sequences, starts, strict=True):
            self.num_requests += 1
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
            try:
                logprobs = (await self.answer(token_ids))[start - 1 :]
            finally:
                self.num_at_once -= 1
            # The same tokens at each place, each one nat less likely than the one before it.
            shape = len(logprobs), num_top
            ids = np.broadcast_to(np.array(self.best[:num_top], np.int32), shape)
            top = TopTokens(ids, np.broadcast_to(-1 - np.arange(num_top, dtype=np.float32), shape))
            ratings.append(PromptRating(logprobs, top if num_top else None))
        return ratings

    async def describe(self, temperature: float) -> ServerFacts:
        return self.facts

    async def health(self) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def model(tmp_path):
    return save_tokenizer(tmp_path / "model", {f"t{i}": i for i in range(20)})


def save_tokenizer(folder, vocabulary):
    folder.mkdir()
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


def facts_of(model, **changes: Any) -> ServerFacts:
    return ServerFacts("test 1", **({"model_path": str(model), "vocab_size": 20} | changes))


def make(model, *clients: LocalTeacher, drops: DropLog | None = None, **settings: Any):
    needs = TeacherNeeds(
        {f"t{i}": i for i in range(20)}, 20, 16, None, top_k=settings.get("top_k", 0)
    )
    urls = [client.url for client in clients]
    return TeacherPool(clients, Teacher(urls=urls, **settings), needs, drops=drops)


async def started(model, *, drops: DropLog | None = None, **settings: Any):
    teacher = LocalTeacher(facts_of(model))
    pool = make(model, teacher, drops=drops, **settings)
    await pool.start(5)
    return pool, teacher


async def rate_one(pool: TeacherPool, completion: np.ndarray = COMPLETION) -> list[float]:
    ((logprobs, top),) = await pool.rate([(PROMPT, completion)])
    assert top is None and logprobs.dtype == np.float32
    return logprobs.tolist()


def rollout(ids: np.ndarray = COMPLETION) -> Rollout:
    return rollouts.rollout(ids, 0.25, prompt_ids=PROMPT)


RATED = [-5.0, -6.0, -7.0]


async def test_each_completion_token_gets_its_logprob_given_all_before_it(model):
    pool, _ = await started(model)
    assert await rate_one(pool) == RATED
    assert pool.take_metrics().keys() == {"teacher/rating_seconds", "teacher/waiting_rollouts"}
    assert "teacher/rating_seconds" not in pool.take_metrics()


async def test_a_teacher_that_is_lost_and_comes_back_rates_everything(model):
    drops = DropLog(lambda text: None)
    pool, teacher = await started(model, drops=drops)
    teacher.answer = refuse
    ratings = [asyncio.create_task(rate_one(pool)) for _ in range(8)]
    asked = teacher.num_requests
    while drops.counts["rating failed"] < 3:
        await asyncio.sleep(0.01)
    assert not any(rating.done() for rating in ratings)
    # By one request in each pause, and not by all that wait.
    assert teacher.num_requests - asked <= 3
    teacher.answer = teacher.by_number
    assert await asyncio.gather(*ratings) == [RATED] * 8


async def test_another_teacher_takes_over_and_no_teacher_gets_too_much(model):
    first, second = (LocalTeacher(facts_of(model), f"http://{c}") for c in "ab")
    pool = make(model, first, second, max_concurrent_requests=2)
    await pool.start(5)

    async def slow(token_ids: list[int]) -> list[float]:
        await asyncio.sleep(0.01)
        return rating_of(token_ids)

    first.answer, second.answer = refuse, slow
    found = await asyncio.gather(*(rate_one(pool) for _ in range(12)))
    assert found == [RATED] * 12
    assert second.most_at_once == 2


ANOTHER_MODEL = r"must serve the model that the run began with"


async def test_a_teacher_that_comes_back_as_another_model_is_not_used(model):
    pool, teacher = await started(model, wait_seconds=0.6)
    teacher.answer = refuse
    rating = asyncio.create_task(rate_one(pool))
    await asyncio.sleep(0.05)
    teacher.answer = rate_otherwise
    with pytest.raises(NotRated, match=ANOTHER_MODEL):
        await rating


async def test_a_teacher_that_became_another_model_while_nobody_asked_is_not_used(
    model, monkeypatch
):
    pool, teacher = await started(model, wait_seconds=0.6)
    await rate_one(pool)
    num_requests = teacher.num_requests
    await rate_one(pool)
    assert teacher.num_requests == num_requests + 1, "a busy teacher is not asked for more"
    monkeypatch.setattr(teacher_pool, "_IDLE_SECONDS", 0.0)
    assert await rate_one(pool) == RATED, "the same model goes on"

    may_answer = asyncio.Event()

    async def answer(token_ids: list[int]) -> list[float]:
        await may_answer.wait()
        return await rate_otherwise(token_ids)

    teacher.answer = answer
    # The second one does not take the question to the teacher for a sign that it is busy.
    ratings = [asyncio.create_task(rate_one(pool)) for _ in range(2)]
    await asyncio.sleep(0.1)
    may_answer.set()
    for rating in ratings:
        with pytest.raises(NotRated, match=ANOTHER_MODEL):
            await rating


async def test_a_rating_is_given_up_after_silence_and_never_invented(model, monkeypatch):
    monkeypatch.setattr(teacher_pool, "MAX_UNRATED_GROUPS", 2)
    pool, teacher = await started(model, wait_seconds=0.3)
    teacher.answer = refuse
    with pytest.raises(Unrated, match=r"No teacher has answered .*teacher\.wait_seconds = 0\.3"):
        await pool.rate_group([rollout(), rollout()])
    with pytest.raises(TeachersFailing, match=r"2 groups in a row got no rating"):
        await pool.rate_group([rollout()])
    assert pool.num_waiting == pool.num_waiting_groups == 0
    teacher.answer, rated = teacher.by_number, []
    while not rated:  # the teacher is left alone for a while first
        with contextlib.suppress(Unrated, TeachersFailing):
            rated = await pool.rate_group([rollout()])
    assert rated[0].teacher_logprobs.tolist() == RATED
    assert rated[0].reward == 0.25


@pytest.mark.parametrize(
    ("settings", "head_start"), [({}, 0.4), ({"max_concurrent_requests": 1}, 0.0)]
)
async def test_a_group_that_began_late_or_had_no_place_yet_is_not_given_up_with_another(
    model, monkeypatch, settings, head_start
):
    monkeypatch.setattr(teacher_pool, "MAX_UNRATED_GROUPS", 2)
    pool, teacher = await started(model, wait_seconds=0.5, **settings)
    teacher.answer = refuse
    first = asyncio.create_task(pool.rate_group([rollout()]))
    await asyncio.sleep(head_start)
    second = asyncio.create_task(pool.rate_group([rollout()]))
    with pytest.raises(Unrated):
        await first
    began = time.monotonic()
    with pytest.raises(TeachersFailing):
        await second
    assert time.monotonic() - began >= 0.3


async def test_short_rollouts_of_a_group_share_a_request_where_the_server_takes_lists(model):
    pool, teacher = await started(model)
    group = [rollout(np.arange(2, n)) for n in (4, 9)]
    for capabilities, sizes in (Capabilities(), [1, 1]), (Capabilities(rates_lists=True), [2]):
        teacher.capabilities, teacher.sizes = capabilities, []
        rated = await pool.rate_group(group)
        assert teacher.sizes == sizes
        for part, given in zip(rated, group, strict=True):
            assert part.teacher_logprobs.tolist() == [-float(i) for i in given.token_ids]


async def test_each_completion_token_comes_with_the_teachers_most_likely_tokens(model):
    pool, teacher = await started(model, top_k=3)
    (rated,) = await pool.rate_group([rollout()])
    assert teacher.num_tops == {3}
    assert rated.teacher_logprobs.tolist() == RATED
    assert rated.teacher_top_ids.dtype == np.int32
    assert rated.teacher_top_ids.tolist() == [[0, 1, 2]] * 3
    assert rated.teacher_top_logprobs.dtype == np.float32
    assert rated.teacher_top_logprobs.tolist() == [[-1.0, -2.0, -3.0]] * 3


async def test_tokens_that_the_student_lacks_are_asked_for_besides_and_left_out(model):
    teacher = LocalTeacher(facts_of(model, vocab_size=22))
    teacher.best = [21, 4, 20, 7, 5]
    pool = make(model, teacher, top_k=2)
    await pool.start(5)
    ((_, top),) = await pool.rate([(PROMPT, COMPLETION)])
    assert teacher.num_tops == {4}
    assert top.ids.tolist() == [[4, 7]] * 3
    assert top.logprobs.tolist() == [[-2.0, -4.0]] * 3


async def test_an_answer_with_too_few_tokens_of_the_student_is_a_wrong_one(model):
    # A server that does not tell its vocabulary is asked for no more than is needed.
    teacher = LocalTeacher(facts_of(model, vocab_size=None))
    teacher.best = [21, 4]
    drops = DropLog(lambda text: None)
    pool = make(model, teacher, drops=drops, top_k=2, wait_seconds=0.3)
    await pool.start(5)
    with pytest.raises(NotRated, match=r"must name 2 of the 20 tokens of the trained model"):
        await pool.rate([(PROMPT, COMPLETION)])
    assert drops.counts["rating failed"] > 0


@pytest.mark.parametrize(
    ("lengths", "most", "parts"),
    [
        ([3, 4, 5, 2], 8, [2, 2]),
        ([9, 1, 1], 8, [1, 2]),
        ([1, 9, 1], 8, [1, 1, 1]),
        ([8], 8, [1]),
        ([1, 1], 0, [1, 1]),
    ],
)
def test_requests_hold_as_many_rollouts_as_they_have_tokens_for(lengths, most, parts):
    found = [lengths[part] for part in request_parts(lengths, most)]
    assert [length for part in found for length in part] == lengths
    assert [len(part) for part in found] == parts


async def test_a_rollout_that_alone_cannot_be_rated_does_not_hold_up_others(model):
    pool, teacher = await started(model)

    async def pick(token_ids: list[int]) -> list[float]:
        if 19 in token_ids and len(token_ids) == 3:
            raise RouteError("POST http://t answered 400: cannot rate this", 400)
        return rating_of(token_ids)

    teacher.answer = pick
    poison = asyncio.create_task(rate_one(pool, np.array([19], np.int32)))
    while not poison.done():
        await rate_one(pool)
        await asyncio.sleep(0.02)
    with pytest.raises(
        NotRated, match=r"failed again and again, and others did not.*cannot rate this"
    ):
        await poison


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"vocab_size": 19}, {}, r"has 19 tokens, and that of the trained model has 20"),
        (
            {"vocab_size": 20 + 129},
            {"top_k": 2},
            r"129 tokens more .*\.top_k it may have at most 128",
        ),
        ({"max_model_len": 16}, {}, r"at most 16 tokens.*--max-model-len 17"),
        ({"model_path": None}, {}, r"no tokenizer\.json in the directory.*Set teacher\.model_path"),
        ({"model_path": "other"}, {}, r"2 of 20 are not in .*token 7 is 't7', which .* has as 8"),
    ],
)
async def test_a_server_that_cannot_be_a_teacher_is_refused_at_the_start(
    model, tmp_path, changes, settings, message
):
    if changes.get("model_path"):
        words = {f"t{i}": i for i in range(20)} | {"t7": 8, "t8": 7}
        changes = {"model_path": str(save_tokenizer(tmp_path / "other", words))}
    with pytest.raises(WrongServer, match=f"(?s)teacher.urls.*{message}"):
        await make(model, LocalTeacher(facts_of(model, **changes)), **settings).start(5)


async def test_a_teacher_may_know_more_tokens(model, tmp_path):
    larger = save_tokenizer(tmp_path / "larger", {f"t{i}": i for i in range(30)})
    await make(model, LocalTeacher(facts_of(larger, vocab_size=30))).start(5)
    # Far more, if they are not among those that are compared.
    await make(model, LocalTeacher(facts_of(model, vocab_size=20 + 129))).start(5)


async def test_teachers_must_all_be_the_same_model(model):
    first, second = (LocalTeacher(facts_of(model), f"http://{c}") for c in "ab")
    second.answer = rate_otherwise
    with pytest.raises(WrongServer, match="rates fixed tokens otherwise, by 1 nats"):
        await make(model, first, second).start(5)


def test_a_teacher_is_asked_for_at_most_as_many_tokens_as_servers_return():
    assert MAX_TOP_K + MOST_FURTHER_TOKENS <= MAX_TOP_TOKENS
