# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that guards can act, and that their limits are read."""

from torchtitan.grpo.config_checks.rules import check_read, require
from torchtitan.grpo.job_config import JobConfig

_ACTING = ("skip", "stop")

_READ_WITH = (
    (
        lambda guards: guards.grad_norm != "off",
        "guards.grad_norm other than 'off'",
        ("grad_norm_limit", "grad_norm_factor", "grad_norm_window"),
    ),
    (
        lambda guards: guards.grad_norm_factor > 0,
        "guards.grad_norm_factor above 0",
        ("grad_norm_window",),
    ),
    (lambda guards: guards.entropy != "off", "guards.entropy other than 'off'", ("entropy_floor",)),
    (
        lambda guards: guards.mismatch_kl != "off",
        "guards.mismatch_kl other than 'off'",
        ("mismatch_kl_limit",),
    ),
    (
        lambda guards: guards.reference_kl != "off",
        "guards.reference_kl other than 'off'",
        ("reference_kl_limit",),
    ),
    (
        lambda guards: guards.servers_lost != "off",
        "guards.servers_lost other than 'off'",
        ("servers_lost_seconds",),
    ),
)


def check_guards(config: JobConfig) -> None:
    """Refuses guards that could never act, and limits that nothing would read."""
    guards, grpo = config.guards, config.grpo
    check_read("guards", guards, _READ_WITH)
    require(
        guards.grad_norm not in _ACTING
        or guards.grad_norm_limit > 0
        or guards.grad_norm_factor > 0,
        f"guards.grad_norm = {guards.grad_norm!r} needs guards.grad_norm_limit or "
        "guards.grad_norm_factor above 0, got 0 for both. Set one of them.",
    )
    require(
        guards.entropy not in _ACTING or grpo.log_entropy or grpo.entropy_coef > 0,
        f"guards.entropy = {guards.entropy!r} needs the entropy, which is not computed with "
        "grpo.log_entropy = false and grpo.entropy_coef = 0. Set grpo.log_entropy = true.",
    )
    require(
        guards.reference_kl not in _ACTING or grpo.kl_coef > 0,
        f"guards.reference_kl = {guards.reference_kl!r} needs a reference model, got "
        f"grpo.kl_coef = {grpo.kl_coef:g}. Raise grpo.kl_coef, or remove guards.reference_kl.",
    )
    require(
        guards.equal_rewards not in _ACTING or config.observe.equal_rewards_steps > 0,
        f"guards.equal_rewards = {guards.equal_rewards!r} acts after observe.equal_rewards_steps "
        "batches, got 0, which is off. Set observe.equal_rewards_steps.",
    )
