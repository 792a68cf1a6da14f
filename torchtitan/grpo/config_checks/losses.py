# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks settings of the loss."""

from collections.abc import Callable

from torchtitan.grpo import config as grpo_config
from torchtitan.grpo.command_line.other_names import answer_to_value
from torchtitan.grpo.config_checks.rules import ConfigError, check_read, require
from torchtitan.grpo.job_config import JobConfig


def check_losses(config: JobConfig) -> None:
    """Refuses settings of the loss that contradict each other, or that nothing would read."""
    _check_comparisons(config)
    _check_policy_loss(config.grpo)
    _check_mismatch(config.grpo)
    check_read("grpo", config.grpo, _READ_WITH)


def _check_comparisons(config: JobConfig) -> None:
    """Checks rewards, advantages and aggregation."""
    grpo, longest = config.grpo, config.rollout.max_new_tokens
    require(
        grpo.group_size > 1 or grpo.advantage == "batch_norm" or not config.has_rewards,
        "grpo.group_size must be at least 2 for advantages relative to the group, got 1. Raise it, "
        f"or set grpo.advantage = 'batch_norm' (it is {grpo.advantage!r}).",
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
    require(
        grpo.aggregation_length == 0 or grpo.aggregation == "constant_length",
        f"grpo.aggregation_length ({grpo.aggregation_length}) is read with grpo.aggregation = "
        f"'constant_length' only, got {grpo.aggregation!r}. Change grpo.aggregation, or leave "
        "grpo.aggregation_length at 0.",
    )


def _check_policy_loss(grpo: grpo_config.GRPO) -> None:
    loss = grpo.policy_loss
    require(
        grpo.dual_clip == 0 or loss in ("clip", "gspo"),
        f"grpo.dual_clip is read with grpo.policy_loss = 'clip' or 'gspo' only, got {loss!r} with "
        f"grpo.dual_clip = {grpo.dual_clip}. Leave grpo.dual_clip at 0.",
    )
    require(
        not grpo.cispo_two_sided or loss == "cispo",
        f"grpo.cispo_two_sided is read with grpo.policy_loss = 'cispo' only, got {loss!r}. Leave "
        "grpo.cispo_two_sided at false.",
    )
    from torchtitan.grpo.losses.objective import metric_reductions
    from torchtitan.grpo.losses.policy_function import check_policy_function

    try:
        check_policy_function(grpo)
        metric_reductions(grpo)  # refuses metrics whose names are those of every loss
    except ValueError as error:
        answer = answer_to_value("grpo.policy_loss", grpo.policy_loss)
        raise ConfigError(f"{error} {answer}".rstrip()) from error


def _check_mismatch(grpo: grpo_config.GRPO) -> None:
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


_Holds = Callable[[grpo_config.GRPO], bool]

_READ_WITH: tuple[tuple[_Holds, str, tuple[str, ...]], ...] = (
    (
        lambda grpo: grpo.kl_coef > 0,
        "grpo.kl_coef above 0",
        ("ref_model_path", "ref_model_ema", "ref_model_offload", "kl_in", "kl_estimator"),
    ),
    (
        lambda grpo: grpo.advantage in ("group_norm", "leave_one_out_norm", "batch_norm"),
        "grpo.advantage = 'group_norm', 'leave_one_out_norm' or 'batch_norm', which divide by a "
        "standard deviation",
        ("advantage_std",),
    ),
    (
        lambda grpo: grpo.advantage in ("group_norm", "leave_one_out_norm", "batch_norm", "max_rl"),
        "grpo.advantage = 'group_norm', 'leave_one_out_norm', 'batch_norm' or 'max_rl', which divide "
        "by a number",
        ("advantage_eps",),
    ),
    (
        lambda grpo: grpo.kl_coef > 0 and grpo.kl_in == "loss",
        "grpo.kl_coef above 0 and grpo.kl_in = 'loss'",
        ("kl_importance",),
    ),
    (
        lambda grpo: grpo.policy_loss == "sapo",
        "grpo.policy_loss = 'sapo'",
        ("sapo_temperature", "sapo_temperature_negative"),
    ),
    (lambda grpo: grpo.overlong_buffer > 0, "grpo.overlong_buffer above 0", ("overlong_penalty",)),
    (
        lambda grpo: grpo.old_policy == "step_start",
        "grpo.old_policy = 'step_start'",
        (
            "mismatch_level",
            "importance_cap",
            "importance_floor",
            "mismatch_veto",
            "mismatch_normalize",
        ),
    ),
    (
        lambda grpo: grpo.mismatch_correction != "none",
        "grpo.mismatch_correction = 'truncate' or 'mask'",
        ("importance_cap", "importance_floor", "mismatch_normalize"),
    ),
    (lambda grpo: grpo.ptx_path is not None, "grpo.ptx_path", ("ptx_coef", "ptx_per_step")),
)
"""Keys of ``[grpo]`` that are read only if another setting holds."""
