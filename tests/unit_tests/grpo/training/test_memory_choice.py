# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What is kept between microbatches is chosen by all ranks alike, and a dry run shows it."""

import re

import pytest
import torch
import torch.distributed as dist

from torchtitan.grpo.config import ClusterRow
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.layout import layout_problems
from torchtitan.grpo.inference.gpu_shares import ASLEEP_BYTES
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.training import memory_choice
from torchtitan.grpo.training.memory_choice import describe_memory, resolve_kept


@pytest.fixture
def case(make_model):
    _, folder = make_model("qwen3")
    config = JobConfig()
    config.model.hf_assets_path = folder
    config.training.seq_len = 64
    return config, read_hf_model(folder)


def resolved(case, monkeypatch, least_bytes: int, num_ranks: int = 8, **settings) -> str:
    config, model = case
    config.parallelism.fsdp_between_microbatches = "auto"
    for name, value in settings.items():
        setattr(config.parallelism, name, value)
    monkeypatch.setattr(dist, "all_reduce", lambda mine, _: mine.clamp_(max=least_bytes))
    monkeypatch.setattr(dist, "get_world_size", lambda: num_ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    resolve_kept(config, model, torch.device("cpu"))
    return config.parallelism.fsdp_between_microbatches


def test_the_smallest_device_decides(case, monkeypatch):
    assert resolved(case, monkeypatch, 2**33) == "keep_all"
    assert resolved(case, monkeypatch, 1000) == "free"
    assert resolved(case, monkeypatch, 1000, num_ranks=1) == "keep_all", "it adds nothing there"
    assert resolved(case, monkeypatch, 2**33, fsdp_reshard_after_forward="always") == "free"
    always = {"fsdp_reshard_after_forward": "always", "pipeline_parallel_degree": 2}
    assert resolved(case, monkeypatch, 2**33, **always) == "free"
    config, _ = case
    monkeypatch.setenv("WORLD_SIZE", "8")  # what was resolved is what a run's folder holds
    assert not any("fsdp_between" in problem for problem in layout_problems(config))
    always["fsdp_reshard_after_forward"] = "default"
    assert resolved(case, monkeypatch, 1000, **always) == "keep_all"


def test_servers_on_the_training_gpus_take_their_part(case, monkeypatch):
    config, _ = case
    config.inference.launch, config.inference.num_servers = True, 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    total = 100 * 2**30
    assert memory_choice._servers_share(config, total) == 0.4
    config.inference.gpu_memory_utilization = 0.15
    assert memory_choice._servers_share(config, total) == 0.3
    config.inference.lend = True  # they sleep while ranks train
    assert memory_choice._servers_share(config, total) == 2 * ASLEEP_BYTES / total
    config.inference.lend, config.inference.num_servers = False, 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert memory_choice._servers_share(config, total) == 0, "they have a GPU of their own"
    lent = ClusterRow(["train", "rollout"], num_servers=3)
    config.cluster = {"both": lent, "own": ClusterRow(["rollout"], num_servers=5)}
    assert memory_choice._servers_share(config, total) == 3 * ASLEEP_BYTES / total


def test_a_dry_run_shows_what_fits_and_what_it_costs(case):
    config, model = case
    lines = "\n".join(describe_memory(config, model, 8, {}))
    assert "a GPU of 80 GB, which is assumed because there is none here" in lines
    assert "(parallelism.fsdp_between_microbatches = 'auto'): keep_all" in lines
    for mode in ("none", "selective (2)", "full"):
        assert f"activation_checkpoint.mode {mode}: " in lines
    assert lines.count("% more FLOPs") == 2 and "configured: 512 tokens in a microbatch" in lines
    assert "which fit" in lines
    config.training.local_batch_size = 10**7
    assert "do NOT fit" in "\n".join(describe_memory(config, model, 8, {}))


def most_tokens(config, model) -> int:
    lines = "\n".join(describe_memory(config, model, 8, {}))
    found = re.search(r"checkpoint.mode none.* at most ([\d,]+) tokens", lines)
    return int(found[1].replace(",", ""))  # pyright: ignore[reportOptionalSubscript]


def test_the_most_tokens_that_are_shown_fit_narrowly_and_no_more_do(case, monkeypatch):
    """Also where `auto` keeps less for them than it does for the microbatches of now."""
    config, model = case
    config.activation_checkpoint.mode = "none"
    monkeypatch.setattr(memory_choice, "ASSUMED_BYTES", 64 * 1024**2)
    most = most_tokens(config, model)
    for tokens, said in ((most, "which fit narrowly"), (most + 1, "do NOT fit")):
        config.training.local_batch_size, config.training.seq_len = 1, tokens
        assert said in "\n".join(describe_memory(config, model, 8, {}))
    config.activation_checkpoint.mode = "memory_budget"
    lines = "\n".join(describe_memory(config, model, 8, {}))
    assert "mode = 'memory_budget' (estimated as 'none', which needs the most)" in lines


def test_a_dense_mask_takes_memory(case):
    config, model = case
    config.training.seq_len, config.training.local_batch_size = 4096, 2
    fixed = memory_choice.estimate(config, model, 8).fixed("free")
    config.grpo.packed_attention = "sdpa"
    assert memory_choice.estimate(config, model, 8).fixed("free") - fixed >= 2 * 2 * 4096**2


def test_settings_that_contradict_are_refused(case, monkeypatch):
    config, _ = case
    monkeypatch.setenv("WORLD_SIZE", "2")
    config.parallelism.fsdp_between_microbatches = "keep_parameters"
    assert not any("fsdp_between" in found for found in layout_problems(config))
    config.parallelism.pipeline_parallel_degree = 2
    assert "must be 'auto' or 'keep_all' with a pipeline" in "\n".join(layout_problems(config))
    config.parallelism.fsdp_reshard_after_forward = "always"
    for degree in (1, 2):
        config.parallelism.pipeline_parallel_degree = degree
        assert "reshard_after_forward = 'always' frees" in "\n".join(layout_problems(config))
