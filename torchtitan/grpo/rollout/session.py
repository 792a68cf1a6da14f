# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the rollout process is made of, put together and taken down in order."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.environments import EnvironmentPool, Episodes
from torchtitan.grpo.rollout.evaluation import Evaluator
from torchtitan.grpo.rollout.judging import GroupJudge
from torchtitan.grpo.rollout.ledger import Ledger
from torchtitan.grpo.rollout.producer import Producer
from torchtitan.grpo.rollout.prompts import (
    PromptSet,
    PromptStream,
    first_prompts,
    open_mixture,
)
from torchtitan.grpo.rollout.ranker import LengthRanker
from torchtitan.grpo.rollout.rollout_filters import CompletionFilter, WasteBudget
from torchtitan.grpo.rollout.saved import SavedRollouts, read_saved
from torchtitan.grpo.rollout.scoring import Scorer
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.fleet import ServerFleet, Tell
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.trajectory import TrajectoryWriter
from torchtitan.grpo.types import Prompt, ServerInfo

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
        self._saved: SavedRollouts | None = None
        if config.saved_rollouts is not None:
            # Newer than the checkpoint's own progress by what was done between the two.
            self._saved = read_saved(Path(config.saved_rollouts), config.start_version)
            config = replace(config, progress=self._saved.progress)
        self._config = config
        self._fleet = ServerFleet(config)
        self._pool: RewardPool | None = None
        self._environments: EnvironmentPool | None = None
        self._stream: PromptStream | None = None

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
            group_size=config.grpo.group_size,
            max_concurrent_rollouts=config.rollout.max_concurrent_rollouts,
            adaptive_concurrency=config.rollout.adaptive_concurrency,
            hedge_seconds=config.rollout.hedge_seconds,
        )
        sampling = _sampling(config)
        if self._environments is not None:
            sampling = _ending_turns(sampling, self._environments.stop_strings, codec)
        self.producer = Producer(
            stream,
            _admission(config),
            self.dispatcher,
            _judge(config, self._pool, codec),
            Ledger(config.progress, self._saved.closed if self._saved is not None else None),
            self._writer(sampling, codec),
            group_size=config.grpo.group_size,
            num_parts=config.rollout.stream_parts if config.rollout.stream else 1,
            overdue=config.rollout.overdue,
            saved=self._saved,
            ranker=LengthRanker(sampling.max_new_tokens / 2)
            if config.rollout.longest_first
            else None,
            window=config.grpo.prompts_per_step,
        )
        if held_out:
            self.evaluator = Evaluator(
                held_out,
                self.dispatcher,
                self._pool,
                len(config.reward.functions),
                codec,
                self._writer(replace(sampling, temperature=0.0, top_p=1.0, top_k=-1), codec),
                config.rollout.max_concurrent_rollouts,
            )

    def _writer(self, sampling: Sampling, codec: TextCodec) -> TrajectoryWriter:
        rollout = self._config.rollout
        episodes = None
        if self._environments is not None:
            episodes = Episodes(
                self._environments,
                codec,
                max_turns=rollout.max_turns,
                stop_token_ids=sampling.stop_token_ids,
                vocab_size=self._config.vocab_size,
            )
        return TrajectoryWriter(
            self.dispatcher,
            sampling,
            segment_tokens=rollout.segment_tokens,
            wait_seconds=rollout.request_timeout_seconds,
            episodes=episodes,
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
            if self._stream is not None:
                await asyncio.to_thread(self._stream.close)
            if self._pool is not None:
                await self._pool.close()
            if self._environments is not None:
                await self._environments.close()
            if hasattr(self, "dispatcher"):
                await self.dispatcher.close()
        finally:
            await self._fleet.close()

    async def _open_inputs(self) -> tuple[TextCodec, PromptStream, list[Prompt]]:
        config = self._config
        codec = await asyncio.to_thread(TextCodec, config.hf_assets_path, config.eos_token_ids)
        saved = self._saved.group_ids if self._saved is not None else set()
        pending = [index for index in config.progress.open if index not in saved]
        stream, samples = await asyncio.to_thread(_open_prompts, config, codec, pending)
        self._stream = stream
        held_out = await asyncio.to_thread(_open_held_out, config, codec)
        self._pool = pool = _pool(config)
        await pool.start()
        columns = {}
        if config.rollout.environment is not None:
            self._environments = environments = _environments(config)
            await environments.start()
            columns = {"environment_reward": [0.0]}
        for prompt in samples:
            await pool.check(prompt, range(len(config.reward.functions)), columns)
            if config.rollout.should_accept is not None:
                await pool.check(prompt, [_acceptor(config)], {"rewards": [0.0]})
        if held_out:
            await pool.check(held_out[0], [len(config.reward.functions)], columns)
        return codec, stream, held_out


def _open_prompts(
    config: RolloutProcessConfig, codec: TextCodec, pending: Sequence[int]
) -> tuple[PromptStream, list[Prompt]]:
    """The stream, and a prompt of each set, whose columns may differ, to try rewards on."""
    with ExitStack() as stack:
        mixture = stack.enter_context(closing(open_mixture(config, codec)))
        samples = [prompts.sample() for prompts in mixture.sets]
        stream = PromptStream(
            mixture,
            seed=config.seed,
            shuffle=config.prompts.shuffle,
            position=config.progress.position,
            pending=pending,
        )
        stack.pop_all()
    return stream, samples


def _open_held_out(config: RolloutProcessConfig, codec: TextCodec) -> list[Prompt]:
    settings = config.evaluation
    if settings.path is None:
        return []
    # What is used is read here in full, and no row later.
    with closing(
        PromptSet.open(
            settings.path, settings.split, config, codec, "evaluation.path", settings.name
        )
    ) as prompts:
        usable, num_too_long = first_prompts(prompts, settings.num_prompts)
    if num_too_long:
        logger.warning("%d held-out prompts are too long and left out", num_too_long)
    return usable


def _pool(config: RolloutProcessConfig) -> RewardPool:
    reward = config.reward
    if not reward.functions:
        raise ValueError("reward.functions must name at least one reward function, got [].")
    # The evaluation's function stands behind the rewards', and the acceptor behind both.
    extra = [config.evaluation.function] if config.evaluation.path is not None else []
    if config.rollout.should_accept is not None:
        extra.append(config.rollout.should_accept)
    return RewardPool(
        [*reward.functions, *extra],
        num_workers=reward.num_workers,
        timeout_seconds=reward.timeout_seconds,
        max_consecutive_failures=reward.max_consecutive_failures,
    )


def _environments(config: RolloutProcessConfig) -> EnvironmentPool:
    rollout = config.rollout
    assert rollout.environment is not None, "asked for where there is one"
    return EnvironmentPool(
        rollout.environment,
        rollout.environment_options,
        num_workers=rollout.environment_workers,
        timeout_seconds=rollout.environment_timeout_seconds,
        max_consecutive_failures=rollout.max_consecutive_failures,
    )


def _ending_turns(sampling: Sampling, stop_strings: Sequence[str], codec: TextCodec) -> Sampling:
    """Sampling that also stops where an environment's turns end.

    Raises:
        ValueError: A stop string is no single token.
    """
    stop_ids = list(sampling.stop_token_ids)
    for text in stop_strings:
        token = codec.single_token(text)
        if token is None:
            raise ValueError(
                f"rollout.environment: its stop string {text!r} must be one token of the model's "
                f"tokenizer, and is {codec.encode_continuation(text)}. Name another, or let turns "
                "end with the end of sequence."
            )
        stop_ids.append(token)
    return replace(sampling, stop_token_ids=tuple(dict.fromkeys(stop_ids)))


def _acceptor(config: RolloutProcessConfig) -> int:
    """Position of ``rollout.should_accept`` in the pool."""
    return len(config.reward.functions) + (config.evaluation.path is not None)


def _judge(config: RolloutProcessConfig, pool: RewardPool, codec: TextCodec) -> GroupJudge:
    rollout = config.rollout
    acceptor = _acceptor(config) if rollout.should_accept is not None else None
    waste = None
    if rollout.dynamic_sampling:
        waste = WasteBudget(int(rollout.dynamic_sampling_limit * config.grpo.prompts_per_step))
    return GroupJudge(
        Scorer(
            pool,
            codec,
            config.reward.functions,
            config.reward.weights,
            acceptor,
            has_environment=rollout.environment is not None,
        ),
        CompletionFilter(rollout.min_completion_tokens, rollout.drop_truncated),
        waste,
    )


def _admission(config: RolloutProcessConfig) -> Admission:
    groups_per_batch, group_size = config.grpo.prompts_per_step, config.grpo.group_size
    # Counted in rollouts, as users do; whole groups are what waits.
    limit = config.rollout.buffer_size_limit or 2 * groups_per_batch * group_size
    return Admission(
        groups_per_batch=groups_per_batch,
        max_staleness=config.rollout.max_head_offpolicyness,
        group_size=group_size,
        max_buffered=limit // group_size,
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
