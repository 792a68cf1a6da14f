# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a waiting rank leaves to servers on its GPU, and configurations for which it is not enough."""

import pytest
import torch

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import ConfigError
from torchtitan.grpo.controller import process_config
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.training import lent_memory
from torchtitan.grpo.training.lent_memory import check_lent_memory, describe_lent_memory
from torchtitan.grpo.training.memory_choice import estimate
from torchtitan.grpo.types import PromptProgress

MIB = 2**20


@pytest.fixture
def case(make_model, monkeypatch):
    """A run on one rank whose GPU has 100 MiB; returns how to set the GPU's bytes as well."""
    _, folder = make_model("qwen3", vocab_size=20_000)
    config = JobConfig()
    config.model.hf_assets_path = folder
    config.training.seq_len = 64
    config.inference.launch = config.inference.lend = True

    def set_bytes(num_bytes: int) -> None:
        monkeypatch.setattr(lent_memory, "device_bytes", lambda _: num_bytes)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    set_bytes(100 * MIB)
    return config, read_hf_model(folder), set_bytes


def part_of(config, model) -> float:
    return process_config(config, model, 0, PromptProgress(), "").lent_part


def test_servers_get_what_the_waiting_rank_does_not_keep(case):
    config, model, _ = case
    memory = estimate(config, model, 1)
    assert memory.gradients > 0 and memory.optimizer == 2 * memory.parameters
    kept = 3 * memory.parameters
    assert part_of(config, model) == pytest.approx(0.9 - kept / (100 * MIB), abs=0.001)
    config.optimizer.offload_while_lent = True
    assert part_of(config, model) == pytest.approx(0.9 - kept / (300 * MIB), abs=0.001)
    config.inference.lend = False
    assert part_of(config, model) == 0
    config.inference.lend = True
    config.rollout.replay = "file"
    assert part_of(config, model) == 0


def test_a_dry_run_tells_what_stays_and_what_is_left(case):
    config, model, _ = case
    config.grpo.kl_coef, config.inference.num_servers = 0.1, 2
    lines = "\n".join(describe_lent_memory(config, model, 1, {}))
    size = f"{round(estimate(config, model, 1).parameters / MIB)} MiB"
    assert f"parameters {size}, optimizer " in lines and f", reference {size})" in lines
    assert "are left for 2 of the servers on each GPU" in lines
    assert f"gpu_memory_utilization is {part_of(config, model) / 2:.3f}" in lines
    assert "each sleeping server is assumed to keep 2.00 GiB of a GPU" in lines
    config.optimizer.offload_while_lent = config.grpo.ref_model_offload = True
    lines = "\n".join(describe_lent_memory(config, model, 1, {}))
    assert f"(parameters {size}, optimizer offloaded)" in lines
    config.inference.lend = False
    assert not list(describe_lent_memory(config, model, 1, {}))


def test_servers_that_cannot_fit_are_refused_with_figures(case):
    config, model, set_bytes = case
    check_lent_memory(config, model)
    kept = 3 * estimate(config, model, 1).parameters
    config.inference.gpu_memory_utilization = round(1.01 - kept / (100 * MIB), 3)
    with pytest.raises(ConfigError, match=r"times 1 .* into a GPU of 100 MiB"):
        check_lent_memory(config, model)
    config.inference.gpu_memory_utilization = round(0.99 - kept / (100 * MIB), 3)
    check_lent_memory(config, model)
    config.inference.gpu_memory_utilization = 0
    set_bytes(int(kept / 0.88))
    with pytest.raises(
        ConfigError, match=r"servers alone take 4 MiB. Set optimizer.offload_while_lent"
    ):
        check_lent_memory(config, model)
    config.optimizer.offload_while_lent = True
    check_lent_memory(config, model)
    config.optimizer.offload_while_lent, config.inference.device = False, "cpu"
    check_lent_memory(config, model)
