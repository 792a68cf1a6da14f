# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tries the reward functions before anything is generated, and warns of answers that earn nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.evaluation import evaluation_sets, set_key
from torchtitan.grpo.rewards.earnable import unearnable_warning
from torchtitan.grpo.rewards.gold_answers import MAX_ROWS, Example, prose_warning
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout.session_parts import evaluation_functions
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt


async def check_held_out(
    config: RolloutProcessConfig,
    pool: RewardPool,
    held_out: Mapping[str, Sequence[Prompt]],
    codec: TextCodec,
    columns: Mapping[str, Sequence[Any]],
) -> tuple[dict[str, float | None], list[str]]:
    """Calls the function of each set of held-out prompts once, and checks its answers.

    Args:
        config: Settings of the rollout process.
        pool: The functions of the evaluation.
        held_out: The prompts of each set.
        codec: Tokenizer of the model.
        columns: Further arguments for the functions, with one value each.

    Returns:
        What each function gives the first prompt with an empty completion, and warnings.

    Raises:
        RewardError: If a function raises, exceeds the time limit, or returns an unusable value.
    """
    scores, warnings = {}, []
    for name, settings in evaluation_sets(config.evaluation).items():
        prompts = held_out[name]
        position = evaluation_functions(config).index(settings.function)
        (scores[name],) = await pool.check(prompts[0], [position], columns)
        rows = [Example(f"{settings.path}, row {p.group_id}", p) for p in prompts[:MAX_ROWS]]
        key = set_key(config.evaluation, name, "path")
        longest = settings.max_new_tokens
        warnings += await answer_warnings(config, pool, position, rows, key, codec, longest)
    return scores, warnings


async def answer_warnings(
    config: RolloutProcessConfig,
    pool: RewardPool,
    position: int,
    examples: Sequence[Example],
    key: str,
    codec: TextCodec,
    max_new_tokens: int = 0,
) -> list[str]:
    """Returns warnings of expected answers for which a built-in reward cannot be earned.

    Args:
        config: Settings of the rollout process.
        pool: The reward functions.
        position: Position of the function in the pool.
        examples: The first prompts of a set.
        key: TOML key of the set.
        codec: Tokenizer of the model.
        max_new_tokens: Longest completion; 0 is ``rollout.max_new_tokens``.
    """
    warning = await prose_warning(pool, position, examples, key)
    if warning is None:
        warning = unearnable_warning(
            pool.functions[position],
            examples,
            key,
            lambda text: len(codec.encode_continuation(text)),
            max_new_tokens or config.rollout.max_new_tokens,
        )
    return [] if warning is None else [warning]
