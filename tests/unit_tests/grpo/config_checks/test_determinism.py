# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Settings under which a run cannot be repeated to the bit, or checkpoints cannot be written."""

import pytest
import torch

from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.config_checks.checkpoints import check_checkpoints
from torchtitan.grpo.config_checks.determinism import check_determinism
from torchtitan.grpo.job_config import JobConfig


@pytest.fixture
def config() -> JobConfig:
    config = JobConfig()
    config.rollout.deterministic, config.rollout.max_head_offpolicyness = True, 0
    config.inference.launch, config.inference.kind = True, "embedded"
    config.checkpoint.enable = True
    return config


@pytest.mark.parametrize(
    ("table", "name", "value"),
    [
        ("rollout", "max_head_offpolicyness", 1),
        ("rollout", "environment", "calculator"),
        ("rollout", "dynamic_sampling", True),
        ("rollout", "stream", True),
        ("inference", "launch", False),
        ("inference", "kind", "vllm"),
    ],
)
def test_what_lets_timing_decide_is_refused(config, table, name, value):
    check_determinism(config)
    setattr(getattr(config, table), name, value)
    with pytest.raises(ConfigError, match=f"rollout.deterministic = true needs {table}.{name}"):
        check_determinism(config)
    config.rollout.deterministic = False
    check_determinism(config)


def test_pinned_checkpoints_need_a_gpu_and_two_are_kept_at_least(config, monkeypatch):
    check_checkpoints(config)
    config.checkpoint.keep_latest_k = 1
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_latest_k must be 0 .* got 1"):
        check_checkpoints(config)
    config.checkpoint.keep_latest_k = 2
    config.checkpoint.async_mode = "async_with_pinned_mem"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"checkpoint\.async_mode = \"async\""):
        check_checkpoints(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_checkpoints(config)
