# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Builds the parts of a rollout session from the configuration."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.evaluation import EvaluationSet, evaluation_sets, set_key
from torchtitan.grpo.inference.access import TEACHER_KEY_VARIABLE
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.http import HttpConnection
from torchtitan.grpo.inference.kinds import IDLE_SECONDS, kind_row
from torchtitan.grpo.inference.urls import checked_urls
from torchtitan.grpo.rewards.gold_answers import MAX_ROWS, Example
from torchtitan.grpo.rewards.gold_values import gold_judge
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.rollout.admission import Admission
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.environments import EnvironmentPool, Episodes
from torchtitan.grpo.rollout.evaluation import Evaluator, HeldOut, SpareRoom
from torchtitan.grpo.rollout.judging import GroupJudge
from torchtitan.grpo.rollout.prompts import (
    PromptSet,
    PromptStream,
    check_rows,
    first_prompts,
    open_mixture,
)
from torchtitan.grpo.rollout.rollout_filters import CompletionFilter, WasteBudget
from torchtitan.grpo.rollout.scoring import Scorer
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher
from torchtitan.grpo.rollout.serving.needs import server_needs
from torchtitan.grpo.rollout.serving.requests import Sampling
from torchtitan.grpo.rollout.teachers import GroupRater, TeacherNeeds, TeacherPool
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.rollout.trajectory import Places, TrajectoryWriter
from torchtitan.grpo.types import Prompt
from torchtitan.grpo.workers.process import Surroundings

logger = logging.getLogger(__name__)


@dataclass
class Inputs:
    """What a run reads, opened and checked.

    Attributes:
        codec: The model's tokenizer.
        stream: Training prompts.
        examples: The first prompts of each set.
        held_out: Prompts of each set of the evaluation, by its name.
        rewards: For each set, what each reward function gives the first prompt with an empty
            completion.
        scores: For each set of the evaluation, what its function gives its first prompt with an
            empty completion.
    """

    codec: TextCodec
    stream: PromptStream
    examples: list[list[Example]]
    held_out: dict[str, list[Prompt]]
    rewards: list[list[float | None]] = field(default_factory=list)
    scores: dict[str, float | None] = field(default_factory=dict)


def make_codec(config: RolloutProcessConfig) -> TextCodec:
    """Opens the model's tokenizer."""
    variables = config.prompts.chat_template_kwargs
    return TextCodec(config.hf_assets_path, config.eos_token_ids, variables, config.date)


def open_prompts(
    config: RolloutProcessConfig,
    codec: TextCodec,
    pending: Sequence[int],
    say: Callable[[str], object] = logger.info,
) -> tuple[PromptStream, list[list[Example]]]:
    """Opens the prompt stream, and checks the rows of each set.

    Args:
        config: Settings of the rollout process.
        codec: The model's tokenizer.
        pending: Prompts that the stream returns first.
        say: Told how far a check has come that takes long.

    Returns:
        The stream, and the first prompts of each set, at least one. The sets may have different
        columns, so the reward functions are checked on the prompts of each set.
    """
    with ExitStack() as stack:
        mixture = stack.enter_context(closing(open_mixture(config, codec)))
        for prompts in mixture.sets:
            checked = check_rows(prompts, gold_judge(config.reward.functions), say=say)
            if checked.num_fitting == 0:
                raise prompts.none_usable_error()
        examples = [_examples(prompts) for prompts in mixture.sets]
        stream = PromptStream(
            mixture,
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
    """Reads the held-out prompts of each set of ``[evaluation]``, by the set's name."""
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


def evaluation_functions(config: RolloutProcessConfig) -> list[str]:
    """Returns the reward functions of the evaluation, each once, in the order of its pool."""
    sets = evaluation_sets(config.evaluation).values()
    return list(dict.fromkeys(settings.function for settings in sets))


def make_reward_pool(config: RolloutProcessConfig, drops: DropLog) -> RewardPool:
    reward = config.reward
    if not (reward.functions or config.teacher.urls):
        raise ValueError("reward.functions must name at least one reward function, got [].")
    functions = list(reward.functions)
    if config.rollout.should_accept is not None:
        functions.append(config.rollout.should_accept)
    return _reward_pool(config, functions, reward.num_workers, drops)


def make_evaluation_pool(config: RolloutProcessConfig, drops: DropLog) -> RewardPool | None:
    """Returns workers for the functions of the evaluation; ``None`` if there is nothing to evaluate.

    They are not those of the rewards: a function that is slow on held-out prompts would otherwise
    keep rollouts waiting for their rewards.
    """
    functions = evaluation_functions(config)
    num_workers = max(1, config.reward.num_workers // 2)
    return _reward_pool(config, functions, num_workers, drops) if functions else None


def _reward_pool(
    config: RolloutProcessConfig, functions: list[str], num_workers: int, drops: DropLog
) -> RewardPool:
    reward = config.reward
    return RewardPool(
        functions,
        num_workers=num_workers,
        timeout_seconds=reward.timeout_seconds,
        max_consecutive_failures=reward.max_consecutive_failures,
        on_failure=drops.record_scoring,
        surroundings=_surroundings(config),
    )


def acceptor_position(config: RolloutProcessConfig) -> int:
    """Returns the position of ``rollout.should_accept`` in the reward pool."""
    return len(config.reward.functions)


def make_dispatcher(
    config: RolloutProcessConfig, clients: Sequence[InferenceClient], drops: DropLog
) -> Dispatcher:
    rollout = config.rollout
    return Dispatcher(
        clients,
        vocab_size=config.vocab_size,
        request_timeout_seconds=rollout.request_timeout_seconds,
        max_consecutive_failures=rollout.max_consecutive_failures,
        group_size=config.grpo.group_size,
        max_concurrent_rollouts=rollout.max_concurrent_rollouts,
        adaptive_concurrency=rollout.adaptive_concurrency,
        hedge_seconds=rollout.hedge_seconds,
        drops=drops,
    )


def make_writer(
    config: RolloutProcessConfig,
    places: Places,
    sampling: Sampling,
    codec: TextCodec,
    environments: EnvironmentPool | None,
) -> TrajectoryWriter:
    """Returns what generates completions with some sampling settings.

    Args:
        config: Settings of the rollout process.
        places: Gives completions their places on servers.
        sampling: The sampling settings. With an environment they also stop where turns end.
        codec: The model's tokenizer.
        environments: The environments; ``None`` without ``rollout.environment``.
    """
    rollout = config.rollout
    ends = [*config.eos_token_ids, *rollout.stop_token_ids]
    sampling = replace(sampling, unknown_ids=codec.unknown_ids(config.vocab_size, ends))
    episodes = None
    if environments is not None:
        sampling = with_turn_ends(sampling, environments.stop_strings, codec)
        episodes = Episodes(
            environments,
            codec,
            max_turns=rollout.max_turns,
            templated=rollout.earlier_turns == "as_templated",
            stop_token_ids=sampling.stop_token_ids,
            vocab_size=config.vocab_size,
        )
    return TrajectoryWriter(
        places,
        sampling,
        segment_tokens=rollout.segment_tokens,
        wait_seconds=rollout.request_timeout_seconds,
        episodes=episodes,
    )


def make_evaluator(
    config: RolloutProcessConfig,
    held_out: Mapping[str, Sequence[Prompt]],
    codec: TextCodec,
    dispatcher: Dispatcher,
    pool: RewardPool | None,
    environments: EnvironmentPool | None,
    drops: DropLog,
) -> Evaluator | None:
    """Returns what evaluates the held-out prompts; ``None`` if there are none.

    Args:
        config: Settings of the rollout process.
        held_out: The prompts of each set.
        codec: The model's tokenizer.
        dispatcher: The servers.
        pool: The functions of the evaluation; ``None`` if there is nothing to evaluate.
        environments: The environments; ``None`` without ``rollout.environment``.
        drops: Counts and announces completions that get no score.
    """
    if pool is None:
        return None
    rollout = config.rollout
    room = SpareRoom(dispatcher, config.evaluation.max_concurrent, rollout.max_concurrent_rollouts)
    sets = [
        HeldOut(
            name,
            settings,
            held_out[name],
            evaluation_functions(config).index(settings.function),
            make_writer(config, room, evaluation_sampling(config, settings), codec, environments),
        )
        for name, settings in evaluation_sets(config.evaluation).items()
    ]
    return Evaluator(sets, dispatcher, room, pool, codec, drops)


def make_environment_pool(config: RolloutProcessConfig, drops: DropLog) -> EnvironmentPool:
    rollout = config.rollout
    assert rollout.environment is not None, "rollout.environment must be set"
    return EnvironmentPool(
        rollout.environment,
        rollout.environment_options,
        num_workers=rollout.environment_workers,
        timeout_seconds=rollout.environment_timeout_seconds,
        max_consecutive_failures=rollout.max_consecutive_failures,
        on_failure=drops.record_episode,
        surroundings=_surroundings(config),
    )


def _surroundings(config: RolloutProcessConfig) -> Surroundings:
    workers = config.workers
    return Surroundings(
        tuple(workers.pass_variables), workers.max_memory_gib, workers.max_cpu_seconds
    )


def with_turn_ends(sampling: Sampling, stop_strings: Sequence[str], codec: TextCodec) -> Sampling:
    """Returns sampling settings that also stop where an environment's turns end.

    Raises:
        ValueError: If a stop string is not a single token.
    """
    stop_ids = list(sampling.stop_token_ids)
    for text in stop_strings:
        token = codec.single_token(text)
        if token is None:
            raise ValueError(
                f"A stop string of rollout.environment must be a single token of the model's "
                f"tokenizer, but {text!r} is encoded as {codec.encode_continuation(text)}. Use "
                "another stop string, or none, so that turns end with the end of sequence."
            )
        stop_ids.append(token)
    return replace(sampling, stop_token_ids=tuple(dict.fromkeys(stop_ids)))


def make_teacher_pool(
    config: RolloutProcessConfig,
    codec: TextCodec,
    drops: DropLog,
    announce: Callable[[str], None] | None,
) -> TeacherPool:
    """Makes the teachers of ``[teacher]``, which are not asked for anything yet.

    Raises:
        ValueError: If a URL is invalid, or the vocabulary has fewer tokens than ``teacher.top_k``.
    """
    settings = config.teacher
    if settings.top_k > config.vocab_size:
        raise ValueError(
            f"teacher.top_k must be at most the size of the model's vocabulary, {config.vocab_size}, got "
            f"{settings.top_k}. Lower it."
        )
    row = kind_row(settings.kind)
    key = settings.api_key or os.environ.get(TEACHER_KEY_VARIABLE)
    clients = [
        row.load_client()(
            HttpConnection(
                url,
                api_key=key,
                admin_key=key,
                timeout_seconds=config.inference.control_timeout_seconds,
                idle_seconds=IDLE_SECONDS,
            ),
            row.capabilities,
            request_timeout_seconds=settings.request_timeout_seconds,
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
    return TeacherPool(clients, settings, needs, drops=drops, announce=announce)


def make_judge(
    config: RolloutProcessConfig,
    pool: RewardPool,
    codec: TextCodec,
    teachers: TeacherPool | None = None,
) -> GroupJudge:
    rollout = config.rollout
    acceptor = acceptor_position(config) if rollout.should_accept is not None else None
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
        fewest_rollouts=min(2, config.grpo.group_size),
        rater=(
            None if teachers is None else GroupRater(teachers, config.teacher.max_unrated_groups)
        ),
    )


def make_admission(config: RolloutProcessConfig) -> Admission:
    groups_per_batch, group_size = config.grpo.prompts_per_step, config.grpo.group_size
    # The option counts rollouts, while admission counts whole groups.
    limit = config.rollout.buffer_size_limit or 2 * groups_per_batch * group_size
    return Admission(
        groups_per_batch=groups_per_batch,
        max_staleness=config.rollout.max_head_offpolicyness,
        group_size=group_size,
        max_buffered=limit // group_size,
        max_concurrent_rollouts=config.rollout.max_concurrent_rollouts,
        start_version=config.start_version,
    )


def make_sampling(config: RolloutProcessConfig) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        max_total_tokens=config.seq_len,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        # Explicit stop tokens end a completion even if EOS is ignored.
        stop_token_ids=(
            *(() if rollout.ignore_eos else config.eos_token_ids),
            *rollout.stop_token_ids,
        ),
        ignore_eos=rollout.ignore_eos,
        seed=config.seed if rollout.deterministic else None,
    )


def evaluation_sampling(config: RolloutProcessConfig, settings: EvaluationSet) -> Sampling:
    """Returns the sampling settings of a set of held-out prompts."""
    return replace(
        make_sampling(config),
        max_new_tokens=settings.max_new_tokens or config.rollout.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        # Greedy decoding draws nothing.
        seed=config.seed if config.rollout.deterministic and settings.temperature > 0 else None,
    )
