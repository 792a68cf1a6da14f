# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts and stops the parts of the rollout process in the right order."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rewards.gold_answers import answer_warnings
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments import EnvironmentPool
from torchtitan.grpo.rollout.evaluation import Evaluator
from torchtitan.grpo.rollout.evaluation_session import check_held_out
from torchtitan.grpo.rollout.ledger import Ledger
from torchtitan.grpo.rollout.model_match import model_warnings
from torchtitan.grpo.rollout.producer import Producer
from torchtitan.grpo.rollout.prompts import PromptStream
from torchtitan.grpo.rollout.ranker import LengthRanker
from torchtitan.grpo.rollout.saved import SavedRollouts, SavedRolloutsError, read_saved
from torchtitan.grpo.rollout.saved_checks import check_saved
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.fleet import ServerFleet, Tell
from torchtitan.grpo.rollout.session_parts import (
    Inputs,
    acceptor_position,
    make_admission,
    make_codec,
    make_dispatcher,
    make_environment_pool,
    make_evaluation_pool,
    make_evaluator,
    make_judge,
    make_reward_pool,
    make_sampling,
    make_teacher_pool,
    make_writer,
    open_held_out,
    open_prompts,
)
from torchtitan.grpo.rollout.teachers import TeacherPool
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.types import ServerInfo

logger = logging.getLogger(__name__)


class RolloutSession:
    """Owns the servers, reward workers, prompts and the producer of one run.

    Args:
        config: Settings of the rollout process.
        announce: Called with sentences that the user should read now. By default they are logged.
        say: Told how far a check of the prompts has come that takes long. By default ``announce``.

    Attributes:
        drops: What was dropped so far.
        warnings: Findings at the start that the user should know about.

    :meth:`close` may be called at any time, including before :meth:`open` and after an
    :meth:`open` that failed.
    """

    dispatcher: Dispatcher
    producer: Producer
    evaluator: Evaluator | None = None

    def __init__(
        self,
        config: RolloutProcessConfig,
        announce: Callable[[str], None] | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.drops = DropLog(announce)
        self._announce = announce
        self._saved = self._read_saved(config)
        if self._saved is not None:
            # This progress is newer than the checkpoint's: it also covers work done since then.
            config = replace(config, progress=self._saved.progress)
        self._config = config
        self._say = say or announce or logger.info
        self._fleet = ServerFleet(config, announce)
        self._teachers: TeacherPool | None = None
        self._pool: RewardPool | None = None
        self._evaluation_pool: RewardPool | None = None
        self._environments: EnvironmentPool | None = None
        self._stream: PromptStream | None = None
        self.warnings: list[str] = []

    def _read_saved(self, config: RolloutProcessConfig) -> SavedRollouts | None:
        """Returns the rollouts kept beside the checkpoint; None without, or if they are damaged."""
        if config.saved_rollouts is None:
            return None
        try:
            saved = read_saved(Path(config.saved_rollouts), config.start_version)
            check_saved(
                saved, config.progress, vocab_size=config.vocab_size, row_len=config.seq_len
            )
        except SavedRolloutsError as error:
            (self._announce or logger.warning)(
                f"The rollouts kept beside the checkpoint of step {config.start_version} "
                f"({config.saved_rollouts}) are damaged and are not used: {error}. Their prompts are "
                "issued again."
            )
            return None
        return saved

    @property
    def servers(self) -> list[ServerInfo]:
        """The servers that belong to the run now."""
        return self._fleet.servers

    @property
    def stop_strings(self) -> list[str] | None:
        """Stop strings of the environment, once the inputs are open; ``None`` without one."""
        return None if self._environments is None else self._environments.stop_strings

    async def open(self) -> None:
        """Starts servers, workers and the producer, and opens the prompts.

        Prompts and rewards are checked while the servers start.

        Raises:
            ValueError: If a prompt or a setting is invalid.
            RewardError: If a reward function cannot be loaded or fails its check.
            WrongServer: If a server or a teacher cannot be used by this run.
            TimeoutError: If a server does not answer in time.
        """
        config = self._config
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fleet.start())
            tasks.create_task(self._start_teachers())
            opening = tasks.create_task(self.open_inputs())
        inputs = opening.result()
        codec = inputs.codec
        self.dispatcher = make_dispatcher(config, self._fleet.clients, self.drops)
        self.producer = self._make_producer(inputs.stream, codec)
        self.evaluator = make_evaluator(
            config,
            inputs.held_out,
            inputs.codec,
            self.dispatcher,
            self._evaluation_pool,
            self._environments,
            self.drops,
        )

    async def _start_teachers(self) -> None:
        config = self._config
        if config.teacher.urls:
            codec = await asyncio.to_thread(make_codec, config)
            self._teachers = make_teacher_pool(config, codec, self.drops, self._announce)
            await self._teachers.start(config.inference.startup_timeout_seconds)

    def _make_producer(self, stream: PromptStream, codec: TextCodec) -> Producer:
        config, saved = self._config, self._saved
        sampling = make_sampling(config)
        assert self._pool is not None, "the reward pool is opened with the inputs"
        ranker = None
        if config.rollout.longest_first:
            ranker = LengthRanker(first_guess=sampling.max_new_tokens / 2)
        return Producer(
            stream,
            make_admission(config),
            self.dispatcher,
            make_judge(config, self._pool, codec, self._teachers),
            Ledger(config.progress, saved.closed if saved is not None else None),
            make_writer(config, self.dispatcher, sampling, codec, self._environments),
            group_size=config.grpo.group_size,
            num_parts=config.rollout.stream_parts if config.rollout.stream else 1,
            overdue=config.rollout.overdue,
            saved=saved,
            drops=self.drops,
            ranker=ranker,
            window=config.grpo.prompts_per_step,
        )

    async def watch_servers(self, tell: Tell) -> None:
        """Follows changes of the servers; see :meth:`ServerFleet.watch`."""
        await self._fleet.watch(self.dispatcher, tell)

    def reread_urls(self) -> None:
        """Reads ``inference.urls_file`` now; see :meth:`ServerFleet.reread_urls`."""
        self._fleet.reread_urls()

    async def close(self) -> None:
        """Stops everything that was started, in bounded time."""
        try:
            if self._stream is not None:
                await asyncio.to_thread(self._stream.close)
            for pool in (self._pool, self._evaluation_pool):
                if pool is not None:
                    await pool.close()
            if self._environments is not None:
                await self._environments.close()
            if self._teachers is not None:
                await self._teachers.close()
            if hasattr(self, "dispatcher"):
                await self.dispatcher.close()
        finally:
            await self._fleet.close()

    async def open_inputs(self) -> Inputs:
        """Opens the tokenizer, the prompts, the rewards and the environment, and checks them.

        Raises:
            ValueError: If a prompt or a setting is invalid.
            RewardError: If a reward function cannot be loaded or fails its check.
        """
        config = self._config
        codec = await asyncio.to_thread(make_codec, config)
        saved = self._saved.group_ids if self._saved is not None else set()
        pending = [index for index in config.progress.open if index not in saved]
        stream, examples = await asyncio.to_thread(open_prompts, config, codec, pending, self._say)
        self._stream = stream
        for prompts in stream.sets:
            if prompts.checked is not None:
                self._warn(filter(None, [prompts.checked.warning(prompts.key, prompts.path)]))
        is_chat = any(not isinstance(of_set[0].prompt.text, str) for of_set in examples)
        self._warn(model_warnings(codec, config, is_chat=is_chat))
        held_out = await asyncio.to_thread(open_held_out, config, codec, self.drops)
        self._pool = pool = make_reward_pool(config, self.drops)
        await pool.start()
        columns = {}
        if config.rollout.environment is not None:
            self._environments = environments = make_environment_pool(config, self.drops)
            await environments.start()
            columns = {"environment_reward": [0.0]}
        inputs = Inputs(codec, stream, examples, held_out)
        key = "prompts.paths" if config.prompts.paths else "prompts.path"
        functions = range(len(config.reward.functions))
        for of_set in examples:
            prompt = of_set[0].prompt
            inputs.rewards.append(await pool.check(prompt, functions, columns))
            for position in functions:
                most = config.rollout.max_new_tokens
                self._warn(await answer_warnings(pool, position, of_set, key, codec.count, most))
            if config.rollout.should_accept is not None:
                await pool.check(prompt, [acceptor_position(config)], {"rewards": [0.0]})
        self._evaluation_pool = pool = make_evaluation_pool(config, self.drops)
        if pool is not None:
            await pool.start()
            scores, warnings = await check_held_out(config, pool, held_out, codec, columns)
            inputs.scores = scores
            self._warn(warnings)
        return inputs

    def _warn(self, warnings: Iterable[str]) -> None:
        for warning in warnings:
            logger.warning("%s", warning)
            self.warnings.append(warning)
