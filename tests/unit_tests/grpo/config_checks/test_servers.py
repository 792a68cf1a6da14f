# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Settings of launched servers are named if the run launches none."""

import pytest

from torchtitan.grpo.command_line import ConfigError
from torchtitan.grpo.config_checks import unused_server_settings
from torchtitan.grpo.config_checks.observe import check_observe
from torchtitan.grpo.config_checks.servers import check_inference, check_weight_sync
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


ADDRESSES = {
    "::1:8000": "in brackets, as in",
    "a:70000": "from 1 to 65535",
    "a:0": "from 1 to 65535",
    "a:http": "from 1 to 65535",
    "a": "the port is missing",
    ":8000": "the host is missing",
    "http://a:8000": "is no name of a host|in brackets",
    "10.0.0.256:8000": "does not appear to be",
    "a b:8000": "is no name of a host",
    "0.0.0.0:8000": "cannot connect to all addresses",
    "[::]:8000": "cannot connect to all addresses",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_registry_needs_an_address_that_servers_reach(address, monkeypatch):
    config = JobConfig()
    config.inference.admin_key = "x"
    config.inference.registry_address = "[::1]:8000"
    check_inference(config)
    config.inference.registry_address = address
    with pytest.raises(ConfigError, match=rf"registry_address must be .*{ADDRESSES[address]}"):
        check_inference(config)


@pytest.mark.parametrize(
    "host", ["", "http://127.0.0.1", "127.0.0.1:9000", "[::1]", "a b", "300.0.0.1", "127.0.0.1/"]
)
def test_addresses_of_this_host_have_neither_scheme_nor_port(host):
    config = JobConfig()
    for good in ("127.0.0.1", "::1", "localhost"):
        config.observe.monitor_host = config.weight_sync.master_address = good
        check_observe(config)
        check_weight_sync(config)
    config.observe.monitor_host = config.weight_sync.master_address = host
    with pytest.raises(ConfigError, match="monitor_host must be an address of this host"):
        check_observe(config)
    with pytest.raises(ConfigError, match="master_address must be auto, or an address"):
        check_weight_sync(config)
