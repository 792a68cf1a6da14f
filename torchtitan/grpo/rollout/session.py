# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the parts of a rollout process, or of an evaluation, and starts and stops them in order."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.cluster import lent_groups
from torchtitan.grpo.config.environments import environments_of, reward_functions
from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.inference.access import TEACHER_KEY_VARIABLE
from torchtitan.grpo.inference.answers import UNPUSHED_VERSION
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.http import HttpConnection
from torchtitan.grpo.inference.kinds import IDLE_SECONDS, kind_row
from torchtitan.grpo.inference.urls import checked_urls
from torchtitan.grpo.inference.waiting import Show
from torchtitan.grpo.rewards.reward_loading import short_names
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.agents.writer import EpisodeWriter
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments.program import Environments
from torchtitan.grpo.rollout.evaluator import Evaluator, HeldOut
from torchtitan.grpo.rollout.inputs import (
    EnvironmentInputs,
    Inputs,
    evaluation_functions,
    make_codec,
)
from torchtitan.grpo.rollout.judging import GroupJudge, Rules
from torchtitan.grpo.rollout.ledger import Ledger
from torchtitan.grpo.rollout.lending.lender import DeviceRequests, Lender
from torchtitan.grpo.rollout.lending.scheduler import LendScheduler
from torchtitan.grpo.rollout.longest_first import LengthRanker
from torchtitan.grpo.rollout.producer import Producer
from torchtitan.grpo.rollout.results import EvaluationResult
from torchtitan.grpo.rollout.saved import SavedRollouts, SavedRolloutsError, check_saved, read_saved
from torchtitan.grpo.rollout.scoring import Scorer
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.fleet import ServerFleet, server_needs
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.serving.spare_slots import Places, SpareSlots
from torchtitan.grpo.rollout.teachers import TeacherNeeds, TeacherPool
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.trajectory import CompletionWriter, TrajectoryWriter
from torchtitan.grpo.types import ServerInfo

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


class _Session:
    """Owns the servers, the inputs with the workers that score completions, and the evaluator.

    ``announce`` is called with messages that the user should see at once. ``say`` and ``warn`` are
    those of `Inputs`. :meth:`close` may be called at any time.
    """

    dispatcher: Dispatcher
    evaluator: Evaluator | None = None
    _teachers: TeacherPool | None = None

    def __init__(
        self,
        config: RolloutProcessConfig,
        announce: Callable[[str], None] | None,
        say: Callable[[str], object] = logger.info,
        warn: Callable[[str], object] = logger.warning,
        show: Show | None = None,
    ) -> None:
        self._config, self._show = config, show
        self.drops = DropLog(announce)
        self.fleet = ServerFleet(config, announce, say, show)
        self.inputs = Inputs(config, self.drops, say, warn)

    async def _open(self, *parts: Coroutine[Any, Any, None]) -> None:
        """Starts the servers and awaits ``parts`` meanwhile, then makes the dispatcher and evaluator."""
        config = self._config
        async with asyncio.TaskGroup() as tasks:
            for part in (self.fleet.start(), *parts):
                tasks.create_task(part)
        self.dispatcher = Dispatcher(
            self.fleet.clients,
            config.rollout,
            vocab_size=config.vocab_size,
            group_size=config.grpo.group_size,
            drops=self.drops,
        )
        self.evaluator = make_evaluator(config, self.inputs, self.dispatcher, self.drops)

    async def close(self) -> None:
        try:
            await self.inputs.close()
            if self._teachers is not None:
                await self._teachers.close()
            if hasattr(self, "dispatcher"):
                await self.dispatcher.close()
        finally:
            await self.fleet.close()


class RolloutSession(_Session):
    """The session of a run, which also owns its teachers and its producer.

    If servers run on lent training devices, a ``lender`` asks for these through ``devices``.
    """

    producer: Producer
    lender: Lender | None = None

    def __init__(
        self,
        config: RolloutProcessConfig,
        announce: Callable[[str], None] | None = None,
        say: Callable[[str], object] | None = None,
        *,
        devices: DeviceRequests | None = None,
        show: Show | None = None,
    ) -> None:
        self._devices = devices
        self._saved = _read_saved(config, announce or logger.warning)
        if self._saved is not None:
            # This progress is newer than the checkpoint's: it also covers work done since then.
            config = replace(config, progress=self._saved.progress)
        super().__init__(config, announce, say or announce or logger.info, show=show)

    async def open(self) -> None:
        await self._open(self._start_teachers(), self.open_inputs())
        self.producer = self._make_producer()

    async def open_inputs(self) -> None:
        saved = self._saved.group_ids if self._saved is not None else set()
        await self.inputs.open([i for i in self._config.progress.open if i not in saved])

    async def _start_teachers(self) -> None:
        config = self._config
        if config.teacher.urls:
            codec = await asyncio.to_thread(make_codec, config)
            self._teachers = make_teacher_pool(config, codec, self.drops)
            limit = config.inference.startup_timeout_seconds
            await self._teachers.start(limit, self._show)

    def _make_producer(self) -> Producer:
        config, saved, stream = self._config, self._saved, self.inputs.stream
        rollout, codec = config.rollout, self.inputs.codec
        admission = Admission(config.grpo, rollout, config.start_version)
        if self._devices is not None and lent_groups(config):
            self.lender = Lender(
                LendScheduler(),
                admission,
                self.dispatcher,
                self.fleet,
                self._devices,
                lambda: self.producer.generating,
                sleep_seconds=config.inference.sleep_timeout_seconds,
            )
        assert stream is not None and self.inputs.pool is not None, "the inputs are open"
        self.inputs.pool.next_step = lambda: admission.next_batch
        return Producer(
            stream,
            admission,
            self.dispatcher,
            self._make_judge(),
            Ledger(config.progress, saved.closed if saved is not None else None),
            {
                name: make_writer(one, codec, self.dispatcher, Sampling.of_rollouts(one.config))
                for name, one in self.inputs.environments.items()
            },
            config.grpo,
            rollout,
            saved=saved,
            drops=self.drops,
            ranker=LengthRanker(rollout.max_new_tokens / 2) if rollout.longest_first else None,
        )

    def _make_judge(self) -> GroupJudge:
        config, pool = self._config, self.inputs.pool
        assert pool is not None, "the inputs are open"
        functions = reward_functions(config)
        names = dict(zip(functions, short_names(functions), strict=True))
        rules = {}
        for name, own in environments_of(config).items():
            scorer = Scorer(
                pool,
                self.inputs.codec,
                own.reward.functions,
                own.reward.weights,
                own.rollout.should_accept,
                names=names,
                has_environment=own.has_episodes,
                unscorable_value=own.reward.unscorable_value,
            )
            rules[name] = Rules(scorer, own.rollout)
        return GroupJudge(rules, config.rollout, config.grpo, self._teachers)


def _read_saved(
    config: RolloutProcessConfig, announce: Callable[[str], object]
) -> SavedRollouts | None:
    if config.saved_rollouts is None:
        return None
    try:
        saved = read_saved(Path(config.saved_rollouts), config.start_version)
        check_saved(saved, config.progress, vocab_size=config.vocab_size, row_len=config.seq_len)
    except SavedRolloutsError as error:
        announce(
            f"The rollouts kept beside the checkpoint of step {config.start_version} "
            f"({config.saved_rollouts}) are damaged and are not used: {error}. Their prompts are "
            "issued again."
        )
        return None
    return saved


def make_writer(
    one: EnvironmentInputs, codec: TextCodec, places: Places, sampling: Sampling
) -> CompletionWriter:
    """Makes the writer of completions, which also stops them at the stop strings of an environment."""
    config, players = one.config, one.players
    ends = [*config.eos_token_ids, *config.rollout.stop_token_ids]
    sampling = replace(sampling, unknown_ids=codec.unknown_ids(config.vocab_size, ends))
    if isinstance(players, Environments):
        stop_ids = [*sampling.stop_token_ids, *_turn_ends(players.stop_strings, codec)]
        sampling = replace(sampling, stop_token_ids=tuple(dict.fromkeys(stop_ids)))
    if players is not None:
        return EpisodeWriter(places, sampling, config, codec, players)
    return TrajectoryWriter(places, sampling, config.rollout)


def _turn_ends(stop_strings: list[str], codec: TextCodec) -> list[int]:
    tokens = []
    for text in stop_strings:
        token = codec.single_token(text)
        if token is None:
            raise ValueError(
                f"A stop string of rollout.environment must be a single token of the model's "
                f"tokenizer, but {text!r} is encoded as {codec.encode_continuation(text)}. Use "
                "another stop string, or none, so that turns end with the end of sequence."
            )
        tokens.append(token)
    return tokens


def make_evaluator(
    config: RolloutProcessConfig, inputs: Inputs, dispatcher: Dispatcher, drops: DropLog
) -> Evaluator | None:
    if inputs.evaluation_pool is None:
        return None
    room = SpareSlots(
        dispatcher, config.evaluation.max_concurrent, config.rollout.max_concurrent_rollouts
    )
    sets = []
    for name, settings in evaluation_sets(config.evaluation).items():
        one = inputs.environments[settings.environment or ""]
        sampling = Sampling.of_evaluation(one.config, settings)
        writer = make_writer(one, inputs.codec, room, sampling)
        position = evaluation_functions(config).index(settings.function)
        sets.append(HeldOut(name, settings, inputs.held_out[name], position, writer))
    return Evaluator(sets, dispatcher, room, inputs.evaluation_pool, inputs.codec, drops)


def make_teacher_pool(
    config: RolloutProcessConfig,
    codec: TextCodec,
    drops: DropLog,
) -> TeacherPool:
    """Makes the pool of the teachers of ``[teacher]``. Sends no request to them."""
    settings = config.teacher
    if settings.top_k > config.vocab_size:
        raise ValueError(
            f"teacher.top_k must be at most the size of the model's vocabulary, {config.vocab_size}, got "
            f"{settings.top_k}. Lower it."
        )
    row = kind_row(settings.kind)
    key = settings.api_key or os.environ.get(TEACHER_KEY_VARIABLE)
    clients = [
        row.make_client(
            HttpConnection(
                url,
                api_key=key,
                admin_key=key,
                timeout_seconds=config.inference.control_timeout_seconds,
                idle_seconds=IDLE_SECONDS,
            ),
            settings.request_timeout_seconds,
        )
        for url in checked_urls(settings.urls, "teacher.urls")
    ]
    needs = TeacherNeeds(
        vocabulary=codec.vocabulary(),
        vocab_size=config.vocab_size,
        num_tokens=server_needs(config).num_tokens,
        model_path=settings.model_path,
        top_k=settings.top_k,
    )
    return TeacherPool(clients, settings, needs, drops=drops)


class EvaluationSession(_Session):
    """The session of one evaluation without a run. A run would report the same results for these weights."""

    def __init__(
        self,
        config: RolloutProcessConfig,
        announce: Callable[[str], None],
        show: Show | None = None,
    ) -> None:
        super().__init__(config, announce, announce, announce, show)

    async def open(self) -> None:
        await self._open(self.inputs.open_evaluation())

    async def evaluate(self) -> EvaluationResult:
        """Evaluates the weights that the servers serve.

        Raises ``TimeoutError`` after ``evaluation.timeout_seconds``, and ``RuntimeError`` if no
        completion of a set received a score.
        """
        evaluator = self.evaluator
        assert evaluator is not None, "open() comes first"
        limit = self._config.evaluation.timeout_seconds
        keeping = asyncio.create_task(self._keep_versions(self.dispatcher))
        watching = asyncio.create_task(self.fleet.watch(self.dispatcher, _ignore))
        evaluating = asyncio.create_task(evaluator.evaluate(UNPUSHED_VERSION))
        tasks = {keeping, watching, evaluating}
        try:
            done, _ = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {evaluating}:
                task.result()  # a server has ended for good
            if evaluating not in done:
                raise TimeoutError(
                    f"The evaluation must end within evaluation.timeout_seconds = {limit:g}: "
                    f"{evaluator.describe()}. Raise it, or lower evaluation.num_prompts."
                )
            return evaluating.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_versions(self, dispatcher: Dispatcher) -> None:
        """Keeps telling the dispatcher, in place of a trainer, which version each server serves.

        The version may change: servers may belong to a run that pushes weights, or may be restarted.
        """
        while True:
            for server in list(dispatcher.servers.values()):
                try:
                    async with asyncio.timeout(self._config.inference.control_timeout_seconds):
                        served = await server.client.version()
                except (ServerError, TimeoutError) as error:
                    logger.info("%s does not tell its version: %s", server.url, error)
                    continue
                version = UNPUSHED_VERSION if served is None else served
                if not server.is_down and (server.version is None or version > server.version):
                    dispatcher.set_version(server.url, version)
            await asyncio.sleep(_LOOK_SECONDS)


async def _ignore(servers: list[ServerInfo]) -> None:
    """Ignores a change of the list of servers, on which only the trainer of a run acts."""
