# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from reward_pools import reward_pool
from rollouts import generation
from stub_clients import serving

from torchtitan.grpo.config import Judge, Reward
from torchtitan.grpo.rewards.scoring_pool import RewardPool, ScoringFailed
from torchtitan.grpo.rollout.rollout_metrics import group_metrics
from torchtitan.grpo.rollout.scoring import Scorer, weighted_sum
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt, RolloutGroup

FUNCTIONS = """
def length(completions, **kw):
    return [float(len(c)) for c in completions]

def hard(completions, log_unscorable):
    for i, c in enumerate(completions):
        if len(c) == 1:
            log_unscorable(i)
    return [None if len(c) == 1 else 1.0 for c in completions]

def even(completions, **kw):
    return [None if len(c) % 2 else 1.0 for c in completions]

# As in the examples of TRL's documentation.
def described(completions, log_extra=None, log_metric=None, **kwargs):
    log_extra("characters", [list(c) for c in completions])
    log_extra("object", [object if c == "12" else 1j for c in completions])
    log_metric("longest", max(map(len, completions)))
    log_metric("accuracy", float("nan"))
    return [0.0] * len(completions)

async def judged(completions, trainer_state, log_metric, **kwargs):
    log_metric("longest", 0)
    log_metric("step", trainer_state.global_step)
    return [0.0] * len(completions)

async def short(completions, rewards, log_metric, **kwargs):
    log_metric("half of a pair: \\ud83d" if len(completions) == 1 else "kept", 1)
    return [len(c) == 1 for c in completions]

def uneven(completions, log_extra):
    log_extra("half", completions[1:])
    return [0.0] * len(completions)
"""
PROMPT = Prompt(0, "1->", np.array([5], np.int32), {})


@pytest.fixture
def codec(repository: Path) -> TextCodec:
    return TextCodec(str(repository / "assets/reverse_digits/model"), [1])


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


# The function `even` gives None for texts of odd lengths, and `hard` says that the policy is why.
SUMS: dict[str, tuple[list[str], list[float], list[str], list[float | None], list[str]]] = {
    "some": (["length", "even"], [0.5, -3.0], ["12", "123"], [-2.0, None], ["", "function"]),
    "none applies": (["length", "even"], [0.5, -3.0], ["1", "123"], [0.5, 1.5], ["", ""]),
    "one that failed": (["length", "even"], [], ["1"], [None], ["function"]),
    "one without a weight": (["length", "even"], [1.0, 0.0], ["1"], [1.0], [""]),
    "without a weight": (["length", "even"], [1.0, 0.0], ["12", "123"], [2.0, 3.0], ["", ""]),
    "alone": (["even"], [], ["1", "123"], [None, None], ["function", "function"]),
    "of the policy": (["hard", "length"], [], ["1", "12"], [None, 3.0], ["policy", ""]),
    "of both": (["hard", "even"], [], ["1", "12"], [None, 2.0], ["policy", ""]),
    "of a built-in": (["boxed_math", "length"], [], ["1", "12"], [None, None], ["function"] * 2),
}


@pytest.mark.parametrize("case", SUMS)
async def test_a_completion_that_a_function_with_a_weight_could_not_score_is_unscored(
    case, functions, codec, caplog
):
    short, weights, texts, rewards, causes = SUMS[case]
    names = [name if name == "boxed_math" else f"{functions}:{name}" for name in short]
    generations = [generation(codec.encode(text)) for text in texts]
    prompt = replace(PROMPT, columns={"answer": None})
    async with reward_pool(names) as pool:
        scorer = Scorer(pool, codec, names, weights)
        rollouts = await scorer.score(prompt, generations)
        scorer.unscorable_value = -1.0
        valued = await scorer.score(prompt, generations)
    assert [rollout.reward for rollout in rollouts] == rewards
    assert [rollout.unscored for rollout in rollouts] == causes
    with_value = [-1.0 if c == "policy" else r for r, c in zip(rewards, causes, strict=True)]
    assert [rollout.reward for rollout in valued] == with_value
    told = [r.message.partition(" ")[0] for r in caplog.records if "does not apply" in r.message]
    assert told == [f"{functions}:even"] * (case in ("none applies", "alone"))
    if case == "some":
        components = [rollout.reward_components for rollout in rollouts]
        assert components == [{"length": 2.0, "even": 1.0}, {"length": 3.0}]
    assert weighted_sum([None, None], [1.0, 2.0]) is None


async def test_an_unreadable_verdict_leaves_its_completion_unscored_and_no_other(functions, codec):
    async def judge(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        said = "I cannot say." if text == "1" else "Score: 4"
        return web.json_response({"choices": [{"message": {"content": said}}]})

    names = ["judge", f"{functions}:length"]
    generations = [generation(codec.encode(text)) for text in ("1", "12", "123")]
    async with serving(judge) as url:
        settings = Judge(url=url, model="m", template="{completion}", retries=0)
        async with reward_pool(names, Reward(judge=settings)) as pool:
            scorer = Scorer(pool, codec, names, [0.1, 1.0])
            rollouts = await scorer.score(PROMPT, generations)
            alone = await scorer.score(PROMPT, generations[:1])
    assert [rollout.reward for rollout in rollouts] == [
        None,
        pytest.approx(2.4),
        pytest.approx(3.4),
    ]
    assert [rollout.unscored for rollout in (*rollouts, *alone)] == ["service", "", "", "service"]


async def test_what_functions_log_is_kept_with_each_rollout_and_averaged_over_groups(
    functions, codec
):
    names = [f"{functions}:{name}" for name in ("described", "judged", "uneven", "short")]
    groups = []
    async with reward_pool(names, max_steps=10) as pool:
        pool.next_step = lambda: 7
        scorer = Scorer(pool, codec, names[:2], [], names[3])
        for texts in (["12", "1"], ["123456", "2"]):
            generations = [generation(codec.encode(text)) for text in texts]
            rollouts = await scorer.score(PROMPT, generations)
            groups.append(RolloutGroup(0, "", tuple(rollouts), ""))
        with pytest.raises(ScoringFailed, match=r"log_extra\('half', ...\) .* each of 2 .*, got 1"):
            await pool.score(PROMPT, ["1", "2"], [[1], [2]], [2])
        accepted = await scorer.accepted(PROMPT, groups[0].rollouts)
        assert [rollout.completion for rollout in accepted] == ["1"]
        with pytest.raises(ScoringFailed, match="logged cannot be sent"):
            await scorer.accepted(PROMPT, groups[0].rollouts[:1])
    first, second = groups[0].rollouts
    assert first.logged == {"characters": ["1", "2"], "object": "<class 'object'>"}
    assert second.logged == {"characters": ["1"], "object": "1j"}
    metrics = group_metrics(groups)
    assert (metrics["reward/logged/longest"], metrics["reward/logged/step"]) == (2.0, 7.0)
    assert "reward/logged/accuracy" not in metrics


async def test_without_functions_each_reward_is_nothing_and_no_worker_is_asked(codec):
    pool = RewardPool([], Reward())  # not started: it could not answer
    rollouts = await Scorer(pool, codec, [], []).score(PROMPT, [generation(2)] * 2)
    assert [(rollout.reward, rollout.reward_components) for rollout in rollouts] == [(0.0, {})] * 2
