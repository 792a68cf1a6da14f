# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Settings of launched servers are named if the run launches none."""

import pytest

from torchtitan.grpo.config_checks import unused_server_settings
from torchtitan.grpo.config_checks.rules import ConfigError
from torchtitan.grpo.config_checks.servers import check_inference
from torchtitan.grpo.job_config import JobConfig


@pytest.mark.parametrize(
    ("source", "value", "others"),
    [("urls", ["http://a:1"], {"api_key": "x"}), ("urls_file", "servers.txt", {})],
)
def test_keys_that_only_launched_servers_read_are_named_without_their_values(source, value, others):
    config = JobConfig()
    inference = config.inference
    # These concern servers that run already, too.
    inference.startup_timeout_seconds, inference.max_model_len = 5.0, 64
    for key, setting in {source: value, **others}.items():
        setattr(inference, key, setting)
    assert unused_server_settings(config) == []
    inference.python, inference.dtype, inference.extra_args = "python3", "float32", ["--key=secret"]
    (warning,) = unused_server_settings(config)
    assert "inference.python, inference.dtype, inference.extra_args, because" in warning
    assert f"the servers of inference.{source} run" in warning
    assert "secret" not in warning
    inference.launch = True
    assert unused_server_settings(config) == []
    inference.launch, config.rollout.replay = False, "rollouts.bin"
    assert unused_server_settings(config) == []


def test_a_token_budget_must_be_above_the_running_requests_of_a_server():
    config = JobConfig()
    config.inference.launch, config.inference.num_servers = True, 2
    config.rollout.max_concurrent_rollouts = 31
    for budget in (0, 17):
        config.inference.max_batched_tokens = budget
        check_inference(config)
    config.inference.max_batched_tokens = 16
    with pytest.raises(ConfigError, match=r"max_batched_tokens must be 0 or above 16.*got 16"):
        check_inference(config)
