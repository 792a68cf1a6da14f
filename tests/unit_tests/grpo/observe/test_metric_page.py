# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""docs/metrics.md describes every metric that the code names, and none that it does not."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from metric_page import metrics, undescribed

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.losses.objective import metric_reductions

FAMILIES = (
    "reward|rollout|loss|policy|mismatch|staleness|data|time|memory|weight_sync|environment|servers"
    "|evaluation|guards|monitor|server|pipeline|lend|wall|wait|ranks"
)
FORM = re.compile(rf"({FAMILIES})/[a-z0-9_]+(/[a-z0-9_]+)?")


@pytest.fixture(scope="module")
def sources(repository: Path) -> list[str]:
    return [file.read_text() for file in (repository / "torchtitan").rglob("*.py")]


def test_every_metric_that_the_source_names_is_described(sources: list[str]):
    nodes = (node for text in sources for node in ast.walk(ast.parse(text)))
    strings = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    found = sorted(filter(FORM.fullmatch, strings))
    assert len(found) > 60  # the search itself works
    assert undescribed(found) == []


def test_the_source_names_every_metric_that_is_described(sources: list[str]):
    """Some keys are put together, so the source is searched for the words of their last part."""
    source = "\n".join(sources).lower()
    last = {m.key: [p for p in re.split(r"\{\w+\}|/", m.key) if p][-1] for m in metrics()}
    dead = [k for k, part in last.items() if not all(w in source for w in part.split("_"))]
    assert dead == []


@pytest.mark.parametrize("policy_loss", ["clip", "gspo", "cispo", "reinforce"])
def test_the_metrics_of_each_loss_are_described(policy_loss):
    config = dataclasses.replace(GRPO(), policy_loss=policy_loss, kl_coef=0.1)
    assert undescribed(metric_reductions(config)) == []


def test_rows_are_whole_and_keys_unique():
    keys = [metric.key for metric in metrics()]
    assert len(set(keys)) == len(keys) > 100
    for metric in metrics():
        assert metric.unit and metric.meaning.endswith(".") and metric.healthy, metric.key
        assert not metric.otherwise or metric.otherwise.endswith("."), metric.key


def test_settings_and_metrics_that_rows_name_exist():
    config = JobConfig()
    text = " ".join(" ".join(metric) for metric in metrics())
    for name in re.findall(r"`([a-z_]+\.[a-z_]+)(?: = [^`]*)?`", text):
        table, key = name.split(".")
        if not key.startswith(("jsonl", "log")):
            assert hasattr(getattr(config, table), key), name
    keys = {metric.key for metric in metrics()}
    for name in re.findall(rf"`((?:{FAMILIES})/[a-z0-9_]+)`", text):
        assert name in keys, name
