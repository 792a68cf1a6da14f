# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Every metric that the code names is described, and descriptions name settings that exist."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.losses.objective import metric_reductions
from torchtitan.grpo.observe.metric_docs import SECTIONS, undescribed

METRICS = [metric for section in SECTIONS for metric in section.metrics]
FAMILIES = (
    "reward|rollout|loss|policy|mismatch|staleness|data|time|memory|weight_sync|environment|servers"
    "|evaluation|guards|monitor|server|pipeline"
)
FORM = re.compile(rf"({FAMILIES})/[a-z0-9_]+(/[a-z0-9_]+)?")
NOT_METRICS: set[str] = set()
"""Strings of the source that look like a metric and are none."""


def named_in(file: Path) -> Iterator[str]:
    """Yields the strings of a source file that look like a metric."""
    for node in ast.walk(ast.parse(file.read_text())):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and FORM.fullmatch(text) and text not in NOT_METRICS:
            yield text


def test_every_metric_that_the_source_names_is_described(repository: Path):
    root = repository / "torchtitan"
    found = {name: file for file in root.rglob("*.py") for name in named_in(file)}
    assert len(found) > 60  # the search itself works
    assert {name: str(found[name]) for name in undescribed(sorted(found))} == {}


@pytest.mark.parametrize("policy_loss", ["clip", "gspo", "cispo", "reinforce"])
def test_the_metrics_of_each_loss_are_described(policy_loss):
    config = dataclasses.replace(GRPO(), policy_loss=policy_loss, kl_coef=0.1)
    assert undescribed(metric_reductions(config)) == []


def test_a_loss_of_the_users_adds_metrics_by_name():
    config = dataclasses.replace(GRPO(), policy_loss=f"{__file__}:own_loss")
    names = list(metric_reductions(config))
    assert undescribed(names) == ["loss/largest_advantage"]
    assert undescribed(names, own_loss=["loss/largest_advantage"]) == []


def own_loss(inputs, config):
    from torchtitan.grpo.losses.loss_metrics import TokenMetric
    from torchtitan.grpo.losses.policy_terms import PolicyTerm

    values = inputs.advantages.detach()
    assert isinstance(values, torch.Tensor)
    return PolicyTerm(
        -inputs.advantages * inputs.logprobs, {"loss/largest_advantage": TokenMetric(values, "max")}
    )


def test_only_keys_that_nothing_describes_are_found():
    keys = [
        "step", "reward/mean", "reward/mine", "rollout/no_such", "servers/10.0.0.1:8000/kv_use",
        "weight_sync/server12/lag", "weight_sync/serverX/lag",
    ]  # fmt: skip
    assert undescribed(keys, rewards=["mine"]) == ["rollout/no_such", "weight_sync/serverX/lag"]
    assert "reward/mine" in undescribed(keys)


def test_descriptions_are_whole_and_keys_unique():
    keys = [metric.key for metric in METRICS]
    assert len(set(keys)) == len(keys)
    for metric in METRICS:
        assert metric.unit and metric.meaning.endswith(".") and metric.healthy, metric.key
        assert not metric.otherwise or metric.otherwise.endswith("."), metric.key


def test_settings_and_metrics_that_descriptions_name_exist():
    config = JobConfig()
    text = " ".join(" ".join(metric) for metric in METRICS)
    for name in re.findall(r"`([a-z_]+\.[a-z_]+)(?: = [^`]*)?`", text):
        table, key = name.split(".")
        if not key.startswith(("jsonl", "log")):
            assert hasattr(getattr(config, table), key), name
    keys = {metric.key for metric in METRICS}
    for name in re.findall(rf"`((?:{FAMILIES})/[a-z0-9_]+)`", text):
        assert name in keys, name
