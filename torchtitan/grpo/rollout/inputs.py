# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Opens and checks what a run reads: tokenizer, prompts, reward functions and the environment."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.environments import (
    environment_weights,
    environments_of,
    own_key,
    reward_functions,
)
from torchtitan.grpo.config.evaluation import evaluation_sets, set_key
from torchtitan.grpo.rewards.gold_values import MAX_ROWS, gold_judge, unearnable_warning
from torchtitan.grpo.rewards.scoring_pool import RewardError, RewardPool
from torchtitan.grpo.rollout.agents.writer import Agents
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments import EnvironmentsFailing
from torchtitan.grpo.rollout.environments.program import Environments
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


@dataclass
class EnvironmentInputs:
    """The opened inputs of one environment. ``config`` is the configuration with its own settings.

    ``examples`` are the first prompts of each of its prompt sets, at least one per set. ``rewards`` are
    the values of its reward functions for an empty completion of the first prompt of each set.
    """

    name: str
    config: RolloutProcessConfig
    examples: list[list[Prompt]] = field(default_factory=list)
    rewards: list[list[float | None]] = field(default_factory=list)
    players: Agents | Environments | None = None

    @property
    def is_chat(self) -> bool:
        return any(not isinstance(of_set[0].text, str) for of_set in self.examples)

    def key(self, setting: str) -> str:
        return own_key(self.name, setting)

    def columns(self) -> dict[str, list[float]]:
        """Example values, for checks, of the columns that episodes provide to reward functions."""
        return {"environment_reward": [0.0]} if self.config.has_episodes else {}

    async def start(self, drops: DropLog) -> None:
        if self.config.agent.is_used:
            self.players = Agents.of(self.config, drops, self.name)
        elif self.config.rollout.environment is not None:
            self.players = Environments(self.config, drops, self.name)
        if self.players is not None:
            await self.players.start()

    async def close(self) -> None:
        if self.players is not None:
            await self.players.close()


class Inputs:
    """The inputs of a run, or of an evaluation without a run, and the workers for reward functions.

    ``say`` is called with the progress of long checks of the prompts, and ``warn`` with each finding
    that the user should know about. :meth:`close` may be called at any time. In an evaluation,
    ``stream`` and ``pool`` are ``None``.

    ``scores`` has the score of an empty completion for each set of the evaluation. ``pool`` has the
    reward functions of all environments, followed by each ``rollout.should_accept``. The evaluation
    has a pool of its own, because a slow function must not keep rollouts waiting.
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
        self.environments = {
            name: EnvironmentInputs(name, own) for name, own in environments_of(config).items()
        }
        self.stream: PromptStream | None = None
        self.held_out: dict[str, list[Prompt]] = {}
        self.scores: dict[str, float | None] = {}
        self.pool: RewardPool | None = None
        self.evaluation_pool: RewardPool | None = None
        self.warnings: list[str] = []

    async def open(self, pending: Sequence[int]) -> None:
        """Opens the inputs of a run. The prompt stream then returns the prompts ``pending`` first."""
        config = self._config
        self.codec = codec = await asyncio.to_thread(make_codec, config)
        self.stream, examples = await asyncio.to_thread(
            open_prompts, config, codec, pending, self._say
        )
        for prompts, of_set in zip(self.stream.sets, examples, strict=True):
            self.environments[prompts.environment].examples.append(of_set)
            self._warn(prompts.notes())
        for one in self.environments.values():
            self._warn(model_warnings(codec, one.config, is_chat=one.is_chat))
        self.held_out = await asyncio.to_thread(open_held_out, config, codec, self._drops)
        await self._open_rewards()
        await self._open_evaluation()

    async def open_evaluation(self) -> None:
        config = self._config
        self.codec = await asyncio.to_thread(make_codec, config)
        self.held_out = await asyncio.to_thread(open_held_out, config, self.codec, self._drops)
        is_chat = any(not isinstance(of_set[0].text, str) for of_set in self.held_out.values())
        self._warn(prompt_notes(self.codec, is_chat=is_chat))
        sets = evaluation_sets(config.evaluation).values()
        for name in dict.fromkeys(settings.environment or "" for settings in sets):
            await self.environments[name].start(self._drops)
        await self._open_evaluation()

    async def close(self) -> None:
        if self.stream is not None:
            await asyncio.to_thread(self.stream.close)
        for part in (self.pool, self.evaluation_pool, *self.environments.values()):
            if part is not None:
                await part.close()

    async def _open_rewards(self) -> None:
        config, functions = self._config, reward_functions(self._config)
        if not (functions or config.teacher.urls):
            raise ValueError("reward.functions must name at least one reward function, got [].")
        named = [one.config.rollout.should_accept for one in self.environments.values()]
        functions = dict.fromkeys([*functions, *filter(None, named)])
        self.pool = pool = self._make_pool(list(functions), config.reward.num_workers)
        await pool.start()
        self._warn(filter(None, [pool.warning]))
        for one in self.environments.values():
            try:
                await one.start(self._drops)
                await self._check_rewards(one, pool)
            except (RewardError, EnvironmentsFailing) as error:
                if not one.name or f"environments.{one.name}." in str(error):
                    raise
                raise type(error)(f"environments.{one.name}: {error}") from error

    async def _check_rewards(self, one: EnvironmentInputs, pool: RewardPool) -> None:
        rollout, functions = one.config.rollout, one.config.reward.functions
        key = one.key("prompts.paths" if one.config.prompts.paths else "prompts.path")
        positions = [pool.functions.index(function) for function in functions]
        if one.config.agent.is_used and not {"agent", "environment"} & set(functions):
            self._warn([
                f"{one.key('agent')}: what its program returns is used only by functions that take "
                f"environment_reward, because {one.key('reward.functions')} does not name agent."
            ])  # fmt: skip
        for of_set in one.examples:
            prompt = of_set[0]
            one.rewards.append(await pool.check(prompt, positions, one.columns()))
            for function in functions:
                self._warn_of_answers(function, of_set, key, rollout.max_new_tokens)
            if rollout.should_accept is not None:
                acceptor = pool.functions.index(rollout.should_accept)
                await pool.check(prompt, [acceptor], {"rewards": [0.0]})

    async def _open_evaluation(self) -> None:
        config = self._config
        if not (functions := evaluation_functions(config)):
            return
        num_workers = max(1, config.reward.num_workers // 2)
        self.evaluation_pool = pool = self._make_pool(functions, num_workers)
        await pool.start()
        for name, settings in evaluation_sets(config.evaluation).items():
            one = self.environments[settings.environment or ""]
            prompts, position = self.held_out[name], functions.index(settings.function)
            (self.scores[name],) = await pool.check(prompts[0], [position], one.columns())
            most = settings.max_new_tokens or one.config.rollout.max_new_tokens
            key = set_key(config.evaluation, name, "path")
            self._warn_of_answers(settings.function, prompts[:MAX_ROWS], key, most)

    def _warn_of_answers(self, function: str, rows: list[Prompt], key: str, most: int) -> None:
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

    def _warn(self, warnings: Iterable[str]) -> None:
        """Passes on each warning once, even if several environments cause it."""
        for warning in warnings:
            if warning not in self.warnings:
                self._warn_user(warning)
                self.warnings.append(warning)


def evaluation_functions(config: RolloutProcessConfig) -> list[str]:
    """The evaluation's reward functions, without duplicates, in the order of its pool."""
    sets = evaluation_sets(config.evaluation).values()
    return list(dict.fromkeys(settings.function for settings in sets))


def make_codec(config: RolloutProcessConfig) -> TextCodec:
    prompts = config.prompts
    return TextCodec(
        config.hf_assets_path, config.eos_token_ids, prompts.chat_template_kwargs, config.date,
        special_tokens=prompts.special_tokens,
    )  # fmt: skip


def open_prompts(
    config: RolloutProcessConfig,
    codec: TextCodec,
    pending: Sequence[int],
    say: Callable[[str], object] = logger.info,
) -> tuple[PromptStream, list[list[Prompt]]]:
    """Opens the prompt stream and checks rows of each set. Also returns the first prompts of each set."""
    owns = environments_of(config)
    with ExitStack() as stack:
        sets = [stack.enter_context(closing(one)) for one in open_sets(config, codec)]
        for prompts in sets:
            functions = owns[prompts.environment].reward.functions
            checked = check_rows(prompts, gold_judge(functions), say=say)
            if checked.num_fitting == 0:
                raise prompts.none_usable_error()
        examples = [_examples(prompts) for prompts in sets]
        stream = PromptStream(
            sets,
            config.prompts.weights or environment_weights(config),
            seed=config.seed,
            shuffle=config.prompts.shuffle,
            position=config.progress.position,
            pending=pending,
        )
        stack.pop_all()
    return stream, examples


def _examples(prompts: PromptSet) -> list[Prompt]:
    sample = prompts.sample()
    # Only the columns differ: reading every prompt would tokenize it.
    others = [
        replace(sample, group_id=row, columns=prompts.columns(row), row=prompts.where(row))
        for row in range(min(MAX_ROWS, len(prompts)))
        if row != sample.group_id
    ]
    return [sample, *others]


def open_held_out(
    config: RolloutProcessConfig, codec: TextCodec, drops: DropLog
) -> dict[str, list[Prompt]]:
    """Loads the held-out prompts. Returns those of each set of ``[evaluation]``, by the set's name."""
    found, owns = {}, environments_of(config)
    for name, settings in evaluation_sets(config.evaluation).items():
        assert settings.path is not None, "a set without a path is refused by the checks"
        key = set_key(config.evaluation, name, "path")
        # All prompts that are used are read here, so the table is closed afterwards.
        own = owns[settings.environment or ""]
        with closing(
            PromptSet.open(settings.path, settings.split, own, codec, key, settings.name)
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
