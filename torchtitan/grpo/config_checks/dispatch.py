# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks settings of the dispatch of completions to servers."""

from torchtitan.grpo.config_checks.rules import require
from torchtitan.grpo.job_config import JobConfig


def check_dispatch(config: JobConfig) -> None:
    """Refuses hedging and ordering that could never have an effect."""
    rollout, inference = config.rollout, config.inference
    hedge_seconds = rollout.hedge_seconds
    require(
        hedge_seconds < rollout.request_timeout_seconds,
        "rollout.hedge_seconds must be below rollout.request_timeout_seconds "
        f"({rollout.request_timeout_seconds:g}), after which the completion has failed, got "
        f"{hedge_seconds:g}.",
    )
    if not config.has_servers:
        return  # nothing is dispatched
    # The file of inference.urls_file may name more servers later, and more may register.
    may_grow = any((inference.urls_file, inference.registry, inference.registry_address))
    num_servers = inference.num_servers if inference.launch else len(inference.urls)
    require(
        hedge_seconds == 0 or may_grow or num_servers > 1,
        f"rollout.hedge_seconds = {hedge_seconds:g} needs a second server, got "
        f"{num_servers}. Raise inference.num_servers, name more inference.urls, or leave "
        "rollout.hedge_seconds at 0.",
    )
    require(
        not rollout.longest_first or config.grpo.prompts_per_step > 1,
        "rollout.longest_first orders the prompts of a batch and has no effect with "
        f"grpo.prompts_per_step = {config.grpo.prompts_per_step}. Leave it at false.",
    )
