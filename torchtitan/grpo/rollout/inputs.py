# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Opens and checks what a run reads: tokenizer, prompts, reward functions and the environment."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.evaluation import evaluation_sets, set_key
from torchtitan.grpo.rewards.gold_answers import MAX_ROWS, Example, unearnable_warning
from torchtitan.grpo.rewards.gold_values import gold_judge
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout.agents.writer import Agents
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments import EnvironmentPool
from torchtitan.grpo.rollout.model_match import model_warnings, prompt_notes
from torchtitan.grpo.rollout.prompts import (
    PromptSet,
    PromptStream,
    check_rows,
    first_prompts,
    open_sets,
)
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import Prompt

logger = logging.getLogger(__name__)


class Inputs:
    """The inputs of a run, or of an evaluation without a run, and the workers that judge them.

    ``say`` is told the progress of long checks of the prompts, and ``warn`` each finding that
    the user should know about. :meth:`close` may be called at any time. In an evaluation,
    ``stream`` and ``pool`` are ``None``.

    ``examples`` are the first prompts of each set, at least one, and ``rewards`` what each function
    gives the first of them with an empty completion; ``scores`` has this of the evaluation's sets.
    ``pool`` has ``rollout.should_accept`` behind the reward functions. The evaluation has workers of
    its own, because a slow function must not keep rollouts waiting.
    """

    codec: TextCodec

    def __init__(
        self,
        config: RolloutProcessConfig,
        drops: DropLog,
        say: Callable[[str], object] = logger.info,
        warn: Callable[[str], object] = logger.warning,
    ) -> None:
        self._config, self._drops, self._say, self._warn_user = config, drops, say, warn
        self.stream: PromptStream | None = None
        self.examples: list[list[Example]] = []
        self.held_out: dict[str, list[Prompt]] = {}
        self.rewards: list[list[float | None]] = []
        self.scores: dict[str, float | None] = {}
        self.pool: RewardPool | None = None
        self.evaluation_pool: RewardPool | None = None
        self.environments: EnvironmentPool | None = None
        self.agents: Agents | None = None
        self.warnings: list[str] = []

    async def open(self, pending: Sequence[int]) -> None:
        """The stream returns the prompts ``pending`` first."""
        config = self._config
        self.codec = codec = await asyncio.to_thread(make_codec, config)
        self.stream, self.examples = await asyncio.to_thread(
            open_prompts, config, codec, pending, self._say
        )
        for prompts in self.stream.sets:
            if prompts.checked is not None:
                self._warn(filter(None, [prompts.checked.warning(prompts.key, prompts.path)]))
        is_chat = any(not isinstance(of_set[0].prompt.text, str) for of_set in self.examples)
        self._warn(model_warnings(codec, config, is_chat=is_chat))
        self.held_out = await asyncio.to_thread(open_held_out, config, codec, self._drops)
        await self._open_rewards()
        await self._open_evaluation()

    async def open_evaluation(self) -> None:
        config = self._config
        self.codec = await asyncio.to_thread(make_codec, config)
        self.held_out = await asyncio.to_thread(open_held_out, config, self.codec, self._drops)
        is_chat = any(not isinstance(of_set[0].text, str) for of_set in self.held_out.values())
        self._warn(prompt_notes(self.codec, is_chat=is_chat))
        await self._open_environments()
        await self._open_evaluation()

    async def close(self) -> None:
        if self.stream is not None:
            await asyncio.to_thread(self.stream.close)
        for pool in (self.pool, self.evaluation_pool, self.environments, self.agents):
            if pool is not None:
                await pool.close()

    async def _open_rewards(self) -> None:
        config, reward = self._config, self._config.reward
        if not (reward.functions or config.teacher.urls):
            raise ValueError("reward.functions must name at least one reward function, got [].")
        functions = list(reward.functions)
        if config.rollout.should_accept is not None:
            functions.append(config.rollout.should_accept)
        self.pool = pool = self._make_pool(functions, reward.num_workers)
        await pool.start()
        self._warn(filter(None, [pool.workers.warning]))
        await self._open_environments()
        key = "prompts.paths" if config.prompts.paths else "prompts.path"
        positions = range(len(reward.functions))
        for of_set in self.examples:
            prompt = of_set[0].prompt
            self.rewards.append(await pool.check(prompt, positions, self._columns()))
            for function in reward.functions:
                self._warn_of_answers(function, of_set, key)
            if (position := acceptor_position(config)) is not None:
                await pool.check(prompt, [position], {"rewards": [0.0]})

    async def _open_environments(self) -> None:
        config, drops = self._config, self._drops
        if config.agent.is_used:
            self.agents = Agents.of(config, drops)
            await self.agents.start()
        if config.rollout.environment is not None:
            self.environments = EnvironmentPool(
                config.rollout, config.workers, drops.record_episode
            )
            await self.environments.start()

    async def _open_evaluation(self) -> None:
        config = self._config
        if not (functions := evaluation_functions(config)):
            return
        num_workers = max(1, config.reward.num_workers // 2)
        self.evaluation_pool = pool = self._make_pool(functions, num_workers)
        await pool.start()
        for name, settings in evaluation_sets(config.evaluation).items():
            prompts, position = self.held_out[name], functions.index(settings.function)
            (self.scores[name],) = await pool.check(prompts[0], [position], self._columns())
            rows = [Example(f"{settings.path}, row {p.group_id}", p) for p in prompts[:MAX_ROWS]]
            key, most = set_key(config.evaluation, name, "path"), settings.max_new_tokens
            self._warn_of_answers(settings.function, rows, key, most)

    def _warn_of_answers(self, function: str, rows: list[Example], key: str, most: int = 0) -> None:
        most = most or self._config.rollout.max_new_tokens
        self._warn(filter(None, [unearnable_warning(function, rows, key, self.codec.count, most)]))

    def _make_pool(self, functions: list[str], num_workers: int) -> RewardPool:
        config = self._config
        pool = RewardPool(
            functions,
            config.reward,
            num_workers=num_workers,
            workers=config.workers,
            max_steps=config.num_steps,
            on_failure=self._drops.record_scoring,
        )
        pool.next_step = lambda: config.start_version
        return pool

    def _columns(self) -> dict[str, list[float]]:
        return {"environment_reward": [0.0]} if self._config.has_episodes else {}

    def _warn(self, warnings: Iterable[str]) -> None:
        for warning in warnings:
            self._warn_user(warning)
            self.warnings.append(warning)


def evaluation_functions(config: RolloutProcessConfig) -> list[str]:
    """The reward functions of the evaluation, each once, in the order of its pool."""
    sets = evaluation_sets(config.evaluation).values()
    return list(dict.fromkeys(settings.function for settings in sets))


def acceptor_position(config: RolloutProcessConfig) -> int | None:
    return len(config.reward.functions) if config.rollout.should_accept is not None else None


def make_codec(config: RolloutProcessConfig) -> TextCodec:
    variables = config.prompts.chat_template_kwargs
    return TextCodec(config.hf_assets_path, config.eos_token_ids, variables, config.date)


def open_prompts(
    config: RolloutProcessConfig,
    codec: TextCodec,
    pending: Sequence[int],
    say: Callable[[str], object] = logger.info,
) -> tuple[PromptStream, list[list[Example]]]:
    """Opens the prompt stream, checks rows of each set, and returns its first prompts as well."""
    with ExitStack() as stack:
        sets = [stack.enter_context(closing(one)) for one in open_sets(config, codec)]
        for prompts in sets:
            checked = check_rows(prompts, gold_judge(config.reward.functions), say=say)
            if checked.num_fitting == 0:
                raise prompts.none_usable_error()
        examples = [_examples(prompts) for prompts in sets]
        stream = PromptStream(
            sets,
            config.prompts.weights,
            seed=config.seed,
            shuffle=config.prompts.shuffle,
            position=config.progress.position,
            pending=pending,
        )
        stack.pop_all()
    return stream, examples


def _examples(prompts: PromptSet) -> list[Example]:
    sample = prompts.sample()
    rows = range(min(MAX_ROWS, len(prompts)))
    # Only the columns differ: reading every prompt would tokenize it.
    others = [(row, replace(sample, group_id=row, columns=prompts.columns(row))) for row in rows]
    return [
        Example(prompts.where(sample.group_id), sample),
        *(Example(prompts.where(row), other) for row, other in others if row != sample.group_id),
    ]


def open_held_out(
    config: RolloutProcessConfig, codec: TextCodec, drops: DropLog
) -> dict[str, list[Prompt]]:
    """The held-out prompts of each set of ``[evaluation]``, by the set's name."""
    found = {}
    for name, settings in evaluation_sets(config.evaluation).items():
        assert settings.path is not None, "a set without a path is refused by the checks"
        key = set_key(config.evaluation, name, "path")
        # All prompts that are used are read here, so the table is closed afterwards.
        with closing(
            PromptSet.open(settings.path, settings.split, config, codec, key, settings.name)
        ) as prompts:
            judge = gold_judge([settings.function])
            found[name], num_too_long = first_prompts(prompts, settings.num_prompts, judge)
        if num_too_long:
            drops.record(
                "held-out prompt",
                f"{num_too_long} of {num_too_long + len(found[name])} prompts of {prompts.path} are left "
                f"out. {prompts.too_long_reason}",
                number=num_too_long * settings.num_samples,
            )
    return found
