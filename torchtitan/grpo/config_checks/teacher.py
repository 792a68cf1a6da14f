# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks settings of distillation."""

from torchtitan.grpo.config import Teacher
from torchtitan.grpo.config_checks.rules import ConfigError, check_read, require
from torchtitan.grpo.inference.kinds import KINDS
from torchtitan.grpo.inference.urls import checked_urls, named_urls
from torchtitan.grpo.job_config import JobConfig

_READ_WITH = (
    (
        lambda teacher: bool(teacher.urls),
        "teacher.urls",
        (
            *("kind", "model_path", "max_concurrent_requests", "request_timeout_seconds"),
            *("wait_seconds", "max_unrated_groups", "api_key"),
        ),
    ),
)


def check_teacher(config: JobConfig) -> None:
    """Refuses teachers that cannot rate what is sampled, and settings that would hide their part."""
    teacher, rollout, grpo = config.teacher, config.rollout, config.grpo
    check_read("teacher", teacher, _READ_WITH)
    _check_used(config)
    _check_top_k(config)
    if not teacher.urls:
        return
    _check_urls(config)
    require(
        config.sft.path is None,
        "teacher.urls and sft.path cannot be combined: a teacher rates what the trained model samples, "
        "and supervised training samples nothing. Remove one of them.",
    )
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    for key, needed in sampling.items():
        value = getattr(rollout, key)
        require(
            value == needed,
            f"teacher.urls needs rollout.{key} = {needed:g}, got {value:g}: teachers rate tokens under "
            "their whole distribution at temperature 1, and the student's tokens must be drawn from "
            "its own for the divergence to be one.",
        )
    require(
        rollout.earlier_turns == "as_written",
        'teacher.urls needs rollout.earlier_turns = "as_written", got '
        f"{rollout.earlier_turns!r}: a teacher reads an episode from its beginning, and not what the "
        "chat template made of earlier turns later on.",
    )
    require(
        not grpo.filter_zero_advantage,
        "grpo.filter_zero_advantage cannot be used with teacher.urls: groups with equal rewards would be "
        "left out, although the teacher's part differs. Set grpo.filter_zero_advantage = false.",
    )
    require(
        not rollout.dynamic_sampling,
        "rollout.dynamic_sampling cannot be used with teacher.urls: groups with equal rewards would be "
        "left out, although the teacher's part differs. Set rollout.dynamic_sampling = false.",
    )
    # With top_k, the teacher's part is no advantage, and a sequence has one sign.
    require(
        grpo.off_policy_mask_threshold == 0 or teacher.top_k > 0,
        "grpo.off_policy_mask_threshold cannot be used with teacher.urls, got "
        f"{grpo.off_policy_mask_threshold:g}: it leaves out sequences by the sign of their advantage, and "
        "with a teacher each token has its own. Set it to 0.",
    )
    if config.reward.functions:
        return
    require(
        teacher.coef > 0,
        "teacher.coef must be above 0 without reward.functions, or nothing would be learned, got "
        f"{teacher.coef:g}.",
    )
    require(
        grpo.overlong_buffer == 0,
        "grpo.overlong_buffer is subtracted from rewards and needs reward.functions, got none. Set "
        "grpo.overlong_buffer = 0.",
    )


def _check_used(config: JobConfig) -> None:
    """Refuses what decides how a rating teaches, in a run without ratings."""
    for key in ("coef", "top_k", "max_divergence"):
        value, default = getattr(config.teacher, key), getattr(Teacher(), key)
        require(
            value == default or config.may_be_taught,
            f"teacher.{key} needs teacher.urls, or rated rollouts in rollout.replay, got {value:g} without "
            f"a teacher. Name one, or set teacher.{key} = {default:g}.",
        )


def _check_top_k(config: JobConfig) -> None:
    teacher = config.teacher
    if teacher.top_k == 0:
        return
    require(
        teacher.max_divergence == 0,
        "teacher.max_divergence cannot be used with teacher.top_k, got "
        f"{teacher.max_divergence:g}: it bounds the divergence of the sampled token, and with top_k no "
        "single token says how much is learned. Set it to 0.",
    )


def _check_urls(config: JobConfig) -> None:
    teacher = config.teacher
    require(
        teacher.kind in KINDS,
        f"teacher.kind must be one of {', '.join(KINDS)}, got {teacher.kind!r}.",
    )
    try:
        urls = checked_urls(teacher.urls, "teacher.urls")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    shared = set(urls) & set(named_urls(config.inference))
    require(
        not shared,
        f"teacher.urls must be other servers than those of inference.urls, got {sorted(shared)} in both: "
        "the trained weights are pushed to the latter.",
    )
