# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the sources of learning: the loss, a teacher, examples, or a critic."""

import functools
from pathlib import Path

from torchtitan.grpo.config.command_line.keys import answer_to_value
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import (
    FILE_ENDINGS,
    ConfigError,
    check_file,
    forbid,
    get,
    refusing,
    require,
)
from torchtitan.grpo.inference.kinds import KINDS
from torchtitan.grpo.inference.urls import checked_urls, named_urls
from torchtitan.grpo.models.hub import is_hub_name

_CRITIC = 'grpo.advantage = "gae"'


def check_comparisons(config: JobConfig) -> None:
    grpo, longest = config.grpo, config.rollout.max_new_tokens
    require(
        grpo.group_size > 1 or grpo.advantage in ("batch_norm", "gae") or not config.has_rewards,
        "grpo.group_size must be at least 2 for advantages relative to the group, got 1. Raise it, "
        f"or set grpo.advantage = 'batch_norm' or 'gae' (it is {grpo.advantage!r}).",
    )
    require(
        grpo.group_size > 1 or not grpo.filter_zero_advantage,
        "grpo.filter_zero_advantage leaves out every group of one rollout. Raise grpo.group_size (it "
        "is 1) or set grpo.filter_zero_advantage = false.",
    )
    require(
        not (grpo.filter_zero_advantage and grpo.kl_coef > 0 and grpo.kl_in == "reward"),
        "grpo.filter_zero_advantage cannot be used with grpo.kl_coef above 0 "
        f"({grpo.kl_coef}) and grpo.kl_in = 'reward': groups with equal rewards are left out before "
        "the penalty, which makes their rewards differ, is known. Set grpo.kl_in = 'loss' or "
        "grpo.filter_zero_advantage = false.",
    )
    require(
        grpo.advantage != "max_rl"
        or not ((grpo.kl_coef > 0 and grpo.kl_in == "reward") or grpo.overlong_buffer > 0),
        "grpo.advantage = 'max_rl' needs rewards of at least 0, so nothing can be subtracted from "
        f"them: got grpo.overlong_buffer = {grpo.overlong_buffer}, grpo.kl_coef = {grpo.kl_coef} "
        f"and grpo.kl_in = {grpo.kl_in!r}. Set grpo.overlong_buffer = 0 and grpo.kl_in = 'loss'.",
    )
    require(
        grpo.overlong_buffer <= longest,
        f"grpo.overlong_buffer must be at most rollout.max_new_tokens ({longest}), got "
        f"{grpo.overlong_buffer}.",
    )


def check_policy_loss(config: JobConfig) -> None:
    from torchtitan.grpo.losses.objective import metric_reductions
    from torchtitan.grpo.losses.policy_function import check_policy_function

    try:
        check_policy_function(config.grpo)
        metric_reductions(config.grpo)  # refuses metrics whose names are those of every loss
    except ValueError as error:
        answer = answer_to_value("grpo.policy_loss", config.grpo.policy_loss)
        raise ConfigError(f"{error} {answer}".rstrip()) from error


def check_mismatch(config: JobConfig) -> None:
    grpo = config.grpo
    require(
        grpo.importance_floor < grpo.importance_cap,
        f"grpo.importance_floor must be below grpo.importance_cap ({grpo.importance_cap}), got "
        f"{grpo.importance_floor}.",
    )
    require(
        grpo.old_policy == "step_start" or grpo.mismatch_correction != "mask",
        "grpo.mismatch_correction = 'mask' needs grpo.old_policy = 'step_start': with 'sampling' the "
        "ratio is taken against the policy that sampled the tokens, and nothing is corrected.",
    )


def check_teacher(config: JobConfig) -> None:
    teacher, rollout, grpo = config.teacher, config.rollout, config.grpo
    require(
        teacher.top_k == 0 or teacher.max_divergence == 0,
        "teacher.max_divergence cannot be used with teacher.top_k, got "
        f"{teacher.max_divergence:g}: it bounds the divergence of the sampled token, and with top_k no "
        "single token says how much is learned. Set it to 0.",
    )
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
    for key in ("grpo.filter_zero_advantage", "rollout.dynamic_sampling"):
        require(
            not get(config, key),
            f"{key} cannot be used with teacher.urls: groups with equal rewards would be left out, "
            f"although the teacher's part differs. Set {key} = false.",
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


def _check_urls(config: JobConfig) -> None:
    teacher = config.teacher
    require(
        teacher.kind in KINDS,
        f"teacher.kind must be one of {', '.join(KINDS)}, got {teacher.kind!r}.",
    )
    with refusing():
        urls = checked_urls(teacher.urls, "teacher.urls")
    shared = set(urls) & set(named_urls(config.inference))
    require(
        not shared,
        f"teacher.urls must be other servers than those of inference.urls, got {sorted(shared)} in both: "
        "the trained weights are pushed to the latter.",
    )


def check_supervised(config: JobConfig) -> None:
    sft, grpo, rollout = config.sft, config.grpo, config.rollout
    if sft.path is None:
        return
    for key in ("path", "held_out_path"):
        path = getattr(sft, key)
        # Any other path may be the name of a data set, which is looked up when it is opened.
        if path is not None and path.endswith(FILE_ENDINGS):
            check_file(f"sft.{key}", path)
    excluded = {
        "rollout.replay": rollout.replay is not None,
        "rollout.record": rollout.record is not None,
        "rollout.stream = true": rollout.stream,
        "observe.print_samples above 0": config.observe.print_samples > 0,
        "prompts.single_rank_load = false": not config.prompts.single_rank_load,
        "grpo.ptx_path": grpo.ptx_path is not None,
        "grpo.kl_coef above 0": grpo.kl_coef > 0,
        "grpo.entropy_coef above 0": grpo.entropy_coef > 0,
        "grpo.num_epochs above 1": grpo.num_epochs > 1,
    }
    forbid(
        "sft.path",
        excluded,
        "supervised training has examples and no rollouts, and passes over them again by itself. "
        "Leave one of them at its default.",
    )
    require(
        rollout.temperature == 1,
        f"sft.path needs rollout.temperature = 1, got {rollout.temperature}: the trainer computes the "
        "log-probabilities of all tokens at that temperature, and supervised training would fit the "
        "tempered distribution instead of the model's own.",
    )
    require(
        sft.examples_per_step >= grpo.num_minibatches,
        f"sft.examples_per_step must be at least grpo.num_minibatches ({grpo.num_minibatches}), "
        f"because each minibatch needs an example, got {sft.examples_per_step}.",
    )


def check_critic(config: JobConfig) -> None:
    """Checks a run with a critic; forbids settings that need group-relative or per-sequence advantages."""
    if not config.has_critic:
        return
    grpo, optimizer, teacher = config.grpo, config.optimizer, config.teacher
    require(
        config.sft.path is None and config.has_rewards,
        f"{_CRITIC} needs rewards to estimate, and "
        f"{'sft.path' if config.sft.path else 'teacher.urls without reward.functions'} gives none. "
        "Choose another grpo.advantage.",
    )
    with_critic = functools.partial(forbid, _CRITIC)
    with_critic(
        {"lora.rank above 0": config.lora.rank > 0},
        "adapters save the memory of a model's optimizer states, and the critic, all of whose weights are "
        "trained, would need that memory again. Set lora.rank = 0, or choose another grpo.advantage.",
    )
    is_original = optimizer.name == "Muon" and optimizer.muon_adjust_lr == "original"
    with_critic(
        {"optimizer.muon_adjust_lr = 'original'": is_original},
        "critic.lr is also Muon's for the critic, and with 'original' its updates are not as large as "
        "AdamW's. Use 'match_rms_adamw'.",
    )
    equal_rewards = {
        "grpo.filter_zero_advantage": grpo.filter_zero_advantage,
        "rollout.dynamic_sampling": config.rollout.dynamic_sampling,
    }
    with_critic(
        equal_rewards,
        "groups with equal rewards have advantages other than 0, and the critic learns from them. Set it "
        "to false.",
    )
    with_critic(
        {"grpo.off_policy_mask_threshold": grpo.off_policy_mask_threshold > 0},
        "it leaves out sequences by the sign of their advantage, and each token has its own. Set it to 0.",
    )
    with_critic(
        {"teacher.urls without teacher.top_k": bool(teacher.urls) and not teacher.top_k},
        "the teacher's part of advantages is relative to the group's mean, and those of the critic are "
        "not. Set teacher.top_k, which makes it a term of the loss.",
    )
    path = config.critic.path
    require(
        path is None or Path(path).is_dir() or is_hub_name(path),
        f"critic.path must be a Hugging Face model directory, or a name on the Hub, got {path}.",
    )
