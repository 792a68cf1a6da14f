# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo train``: its command line, and how many ranks it starts."""

import pytest
import torch

from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.start import torchrun
from torchtitan.grpo.start.train import choose_num_ranks, parse, plan

ROWS = (
    *("--cluster.both.tags=train,rollout", "--cluster.both.num_servers=8"),
    *("--cluster.own.tags=rollout", "--cluster.own.num_servers=3"),
)
LAUNCH = ("--inference.launch", "--inference.kind=vllm")


@pytest.mark.parametrize(
    ("arguments", "num_ranks", "max_restarts", "rest"),
    [
        ("x.toml", None, 0, ""),
        ("x.toml --gpus 2 --a.b=1", 2, 0, " --a.b=1"),
        ("--nproc=3 --job.config_file x.toml", 3, 0, ""),
        ("x.toml --nproc_per_node 4", 4, 0, ""),
        ("x.toml --max-restarts 3 --a.b=1", None, 3, " --a.b=1"),
        ("x.toml --max_restarts=3", None, 3, ""),
    ],
)
def test_numbers_of_ranks_and_restarts_are_not_the_ranks(arguments, num_ranks, max_restarts, rest):
    parsed = parse(arguments.split())
    assert (parsed.num_ranks, parsed.max_restarts) == (num_ranks, max_restarts)
    assert " ".join(parsed.rest) == f"--job.config_file x.toml{rest}"


@pytest.mark.parametrize("line", ["x.toml --dry-run", "--dry-run x.toml", "--nproc 2 x.toml"])
def test_the_file_may_follow_options(line):
    rest = parse([*line.split(), "--prompts.paths", "a.jsonl", "b.toml"]).rest
    assert rest[rest.index("--job.config_file") + 1] == "x.toml"
    assert rest[-3:] == ["--prompts.paths", "a.jsonl", "b.toml"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("--gpus 0", r"--gpus must be a number of ranks, at least 1, got"),
        ("--gpus all", r"--gpus must be a number of ranks, at least 1, got"),
        ("--gpus", r"--gpus must be a number of ranks, at least 1, got"),
        ("--max-restarts=-1", r"--max-restarts must be a number of restarts.*'-1'"),
    ],
)
def test_a_number_that_is_none_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        parse(["x.toml", *value.split()])


@pytest.mark.parametrize(
    ("arguments", "num_gpus", "num_ranks"),
    [
        ((), 0, 1),
        ((), 8, 8),
        (LAUNCH, 8, 7),
        ((*LAUNCH, "--inference.num_servers=4"), 8, 4),
        ((*LAUNCH, "--inference.device=cpu"), 8, 8),
        # With one GPU, or two servers on two, trainer and servers share them.
        (LAUNCH, 1, 1),
        ((*LAUNCH, "--inference.num_servers=2"), 2, 1),
        ((*LAUNCH, "--inference.lend"), 8, 8),
        ((*LAUNCH, *ROWS), 8, 5),
        ((*LAUNCH, *ROWS, "--cluster.own.gpus=6,7"), 8, 6),
        (("--parallelism.tensor_parallel_degree=2",), 0, 2),
        (("--parallelism.tensor_parallel_degree=2",), 5, 4),
        ((*LAUNCH, "--parallelism.tensor_parallel_degree=2"), 4, 2),
        (("--parallelism.tensor_parallel_degree=2", *LAUNCH), 2, 2),
        (("--parallelism.data_parallel_shard_degree=3",), 8, 3),
        (("--parallelism.data_parallel_shard_degree=3",), 0, 3),
    ],
)
def test_ranks_are_as_many_as_the_layout_and_the_gpus_allow(arguments, num_gpus, num_ranks):
    assert choose_num_ranks(read_config(list(arguments)), num_gpus, None) == num_ranks


def test_too_few_gpus_are_refused():
    config = read_config(["--parallelism.tensor_parallel_degree=4"])
    for num_ranks, message in (
        (None, r"\[parallelism\] needs 4 ranks .*and 2 GPUs are visible"),
        (3, r"--gpus \(or --nproc\) must be at most .*visible GPUs, 2, got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose_num_ranks(config, 2, num_ranks)
    assert choose_num_ranks(config, 0, 3) == 3


def test_all_settings_may_be_given_without_a_file():
    with pytest.raises(ConfigError, match="A configuration must be named"):
        plan(parse(["--nproc", "2"]))
    config, num_ranks, _ = plan(parse(["--nproc", "2", "--inference.launch", "--training.steps=3"]))
    assert (config.training.steps, num_ranks) == (3, 2)


@pytest.mark.parametrize(
    "has_gpu, given, threads, policy",
    [
        (False, {}, "2", "PASSIVE"),
        (False, {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "ACTIVE"}, "5", "ACTIVE"),
        (True, {}, "1", None),
    ],
)
def test_ranks_without_gpus_divide_the_cores(monkeypatch, has_gpu, given, threads, policy):
    started = []
    environment = dict(given)
    monkeypatch.setattr(torchrun.os, "environ", environment)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torchrun, "_pass_on_signals", lambda: None)
    monkeypatch.setattr(torchrun.logging, "disable", lambda level: None)
    monkeypatch.setattr(
        torchrun, "elastic_launch", lambda *config: lambda *command: started.append(command)
    )
    assert torchrun.run_agent([], 1.0, min_nodes=1, max_nodes=1, nproc_per_node=3) == 0
    assert started
    assert environment["OMP_NUM_THREADS"] == threads
    assert environment.get("OMP_WAIT_POLICY") == policy
