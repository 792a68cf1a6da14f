# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the rollout process is made of, put together and taken down in order."""

import asyncio
import logging
from dataclasses import replace

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rewards.pool import RewardPool
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.dispatch import Dispatcher
from torchtitan.grpo.rollout.evaluation import Evaluator
from torchtitan.grpo.rollout.producer import Producer
from torchtitan.grpo.rollout.prompts import PromptSet, PromptStream, first_prompts
from torchtitan.grpo.rollout.requests import Sampling
from torchtitan.grpo.rollout.scoring import Scorer
from torchtitan.grpo.rollout.servers import ServerFleet, Tell
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.wire import ServerInfo
from torchtitan.grpo.types import Prompt

logger = logging.getLogger(__name__)


class RolloutSession:
    """Owns the servers, reward workers, prompts and the producer of one run.

    Between construction and :meth:`open` it owns nothing; :meth:`close` may be called at
    any time, also after an :meth:`open` that failed half-way.
    """

    dispatcher: Dispatcher
    producer: Producer
    evaluator: Evaluator | None = None

    def __init__(self, config: RolloutProcessConfig) -> None:
        self._config = config
        self._fleet = ServerFleet(config)
        self._pool: RewardPool | None = None

    @property
    def servers(self) -> list[ServerInfo]:
        """The servers of now."""
        return self._fleet.servers

    async def open(self) -> None:
        """Brings everything up; prompts and rewards are checked while servers start.

        Raises:
            ValueError: Prompts or settings are bad.
            RewardError: A reward function is bad.
            TimeoutError: A server does not answer.
        """
        config = self._config
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fleet.start())
            inputs = tasks.create_task(self._open_inputs())
        codec, stream, held_out = inputs.result()
        assert self._pool is not None, "the pool is opened with the inputs"
        self.dispatcher = Dispatcher(
            self._fleet.clients,
            vocab_size=config.vocab_size,
            request_timeout_seconds=config.rollout.request_timeout_seconds,
            max_consecutive_failures=config.rollout.max_consecutive_failures,
        )
        sampling = _sampling(config)
        self.producer = Producer(
            stream,
            _admission(config),
            self.dispatcher,
            Scorer(self._pool, codec, config.reward.functions, config.reward.weights),
            sampling,
            group_size=config.grpo.group_size,
            prompt_position=config.prompt_position,
        )
        if held_out:
            self.evaluator = Evaluator(
                held_out,
                self.dispatcher,
                self._pool,
                len(config.reward.functions),
                codec,
                replace(sampling, temperature=0.0, top_p=1.0, top_k=-1),
                config.rollout.max_concurrent_rollouts,
            )

    async def watch_servers(self, tell: Tell) -> None:
        """Follows what becomes of the servers; see :meth:`ServerFleet.watch`."""
        await self._fleet.watch(self.dispatcher, tell)

    def reread_urls(self) -> None:
        """See :meth:`ServerFleet.reread_urls`."""
        self._fleet.reread_urls()

    async def close(self) -> None:
        """Ends everything that was started. Bounded in time."""
        try:
            if self._pool is not None:
                await self._pool.close()
            if hasattr(self, "dispatcher"):
                await self.dispatcher.close()
        finally:
            await self._fleet.close()

    async def _open_inputs(self) -> tuple[TextCodec, PromptStream, list[Prompt]]:
        config = self._config
        codec = await asyncio.to_thread(TextCodec, config.hf_assets_path, config.eos_token_ids)
        stream, first = await asyncio.to_thread(_open_prompts, config, codec)
        held_out = await asyncio.to_thread(_open_held_out, config, codec)
        self._pool = pool = _pool(config)
        await pool.start()
        await pool.check(first, range(len(config.reward.functions)))
        if held_out:
            await pool.check(held_out[0], [len(config.reward.functions)])
        return codec, stream, held_out


def _open_prompts(config: RolloutProcessConfig, codec: TextCodec) -> tuple[PromptStream, Prompt]:
    settings = config.prompts
    prompts = PromptSet.open(
        settings.path, settings.split, config, codec, "prompts.path", settings.name
    )
    position = config.prompt_position

    def stream() -> PromptStream:
        return PromptStream(prompts, seed=config.seed, shuffle=settings.shuffle, position=position)

    # The look ahead must not use up the first prompt.
    return stream(), stream().next()


def _open_held_out(config: RolloutProcessConfig, codec: TextCodec) -> list[Prompt]:
    settings = config.evaluation
    if settings.path is None:
        return []
    prompts = PromptSet.open(
        settings.path, settings.split, config, codec, "evaluation.path", settings.name
    )
    usable, num_too_long = first_prompts(prompts, settings.num_prompts)
    if num_too_long:
        logger.warning("%d held-out prompts are too long and left out", num_too_long)
    return usable


def _pool(config: RolloutProcessConfig) -> RewardPool:
    reward = config.reward
    if not reward.functions:
        raise ValueError("reward.functions must name at least one reward function, got [].")
    # The evaluation's function stands behind the rewards'.
    extra = [config.evaluation.function] if config.evaluation.path is not None else []
    return RewardPool(
        [*reward.functions, *extra],
        num_workers=reward.num_workers,
        timeout_seconds=reward.timeout_seconds,
        max_consecutive_failures=reward.max_consecutive_failures,
    )


def _admission(config: RolloutProcessConfig) -> Admission:
    return Admission(
        groups_per_batch=config.grpo.prompts_per_step,
        max_staleness=config.rollout.max_head_offpolicyness,
        group_size=config.grpo.group_size,
        max_concurrent_rollouts=config.rollout.max_concurrent_rollouts,
        start_version=config.start_version,
    )


def _sampling(config: RolloutProcessConfig) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        max_total_tokens=config.seq_len,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        # A stop token given by name ends a completion even where EOS is ignored.
        stop_token_ids=(
            *(() if rollout.ignore_eos else config.eos_token_ids),
            *rollout.stop_token_ids,
        ),
        ignore_eos=rollout.ignore_eos,
    )
