# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks the table ``[reward.judge]``."""

import os
import re
from dataclasses import fields

from torchtitan.grpo.config import Judge
from torchtitan.grpo.config.environments import reward_functions
from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config.judge import template_text
from torchtitan.grpo.config_checks.rules import refusing, require
from torchtitan.grpo.rewards.reward_loading import JUDGE
from torchtitan.grpo.system.environment import is_named


def check_judge(config: JobConfig) -> None:
    judge = config.reward.judge
    named = [
        *reward_functions(config),
        *(s.function for s in evaluation_sets(config.evaluation).values()),
    ]
    if JUDGE not in named:
        _check_unread(judge)
    elif config.has_servers:
        _check_server(judge)
        if os.environ.get("GROUP_RANK", "0") == "0":  # other machines do not read its file
            with refusing():
                template_text(judge)
        if judge.score:
            _check_score(judge.score)
        limit = config.reward.timeout_seconds
        require(
            judge.timeout_seconds <= limit,
            f"reward.judge.timeout_seconds must be at most reward.timeout_seconds ({limit:g}), which limits "
            f"all requests of a group, got {judge.timeout_seconds:g}. Raise reward.timeout_seconds.",
        )
        variable, passed = judge.api_key_variable, config.workers.pass_variables
        require(
            variable is None or is_named(variable, passed),
            f"reward.judge.api_key_variable = {variable!r} must also be in workers.pass_variables, because "
            f"a worker sees no other keys, got {passed}.",
        )


def _check_unread(judge: Judge) -> None:
    default = Judge()
    for f in fields(judge):
        value = getattr(judge, f.name)
        require(
            value == getattr(default, f.name),
            f"reward.judge.{f.name} needs the function 'judge' in reward.functions or "
            f"evaluation.function, got {value!r}, which nothing would read. Name it, or remove "
            f"reward.judge.{f.name}.",
        )


def _check_server(judge: Judge) -> None:
    url = judge.url or ""
    require(
        re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", url) is not None,
        "reward.judge.url must be the base URL of the judge, such as http://host:8000/v1, without a key, "
        f"got {re.sub(r'//[^/]*@', '//***@', url)!r}. Keys are given with reward.judge.api_key_variable.",
    )
    require(
        judge.kind == "score" or bool(judge.model),
        'reward.judge.model must name the model on the server with reward.judge.kind = "chat", got '
        f"{judge.model!r}.",
    )


def _check_score(score: str) -> None:
    rule = "reward.judge.score must be a regular expression whose first group is the score"
    try:
        num_groups = re.compile(score).groups
    except re.error as error:
        require(False, f"{rule}, got {score!r}: {error}.")
    else:
        require(num_groups > 0, f"{rule}, got {score!r} without a group.")
