# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Choices that depend on GPUs and on the number of machines, also of each thread."""

import ast
import os
import re
from pathlib import Path

import pytest
import torch

import torchtitan.grpo
from torchtitan.grpo.system.device import (
    choose_interfaces,
    num_training_gpus,
    settle_device,
    visible_gpus,
)

CUDA = [("CUDA_DEVICE_MAX_CONNECTIONS", "32", "1"), ("CUDA_MODULE_LOADING", "EAGER", "LAZY")]


@pytest.mark.parametrize(("variable", "default", "other"), CUDA)
def test_cuda_is_set_so_that_training_waits_for_no_push(variable, default, other, monkeypatch):
    monkeypatch.setenv(variable, other)
    settle_device()
    assert os.environ[variable] == other
    monkeypatch.delenv(variable)
    settle_device()
    assert os.environ[variable] == default


def test_gpus_have_the_names_that_a_server_must_be_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,9")
    assert visible_gpus() == ["5", "7", "9"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert visible_gpus() == []


def test_each_rank_of_this_machine_has_a_gpu_as_far_as_there_are_some(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for num_gpus, local_ranks, expected in ((4, "2", 2), (2, "4", 2), (0, "1", 0), (8, "", 4)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=num_gpus: n)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
        assert num_training_gpus() == expected


@pytest.mark.parametrize(
    ("world", "local", "gloo", "nccl"), [("2", "2", "lo", None), ("4", "2", "lo", "=lo")]
)
def test_the_ranks_groups_use_one_interface(world, local, gloo, nccl, monkeypatch):
    chosen = {"GLOO_SOCKET_IFNAME": "x", "NCCL_SOCKET_IFNAME": "y"}
    variables = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "MASTER_PORT": "29400", **chosen}
    variables["MASTER_ADDR"] = "127.0.0.1"  # so that the route is over loopback here
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    choose_interfaces()
    assert chosen == {name: os.environ[name] for name in chosen}, "a user's choice stays"
    for name in chosen:
        monkeypatch.delenv(name)
    choose_interfaces()
    found = [os.environ.get(name) for name in chosen]
    for name in chosen:  # set by the function, which monkeypatch does not know of
        os.environ.pop(name, None)
    assert found == [gloo, nccl]


PACKAGE = Path(torchtitan.grpo.__path__[0])
# CUDA makes a context of half a GiB on the first GPU if a thread uses an event before it has chosen one.
# Name of each thread that uses streams, events or device memory: where it chooses the GPU.
ON_A_GPU = {
    "embedded-{}": ("inference/embedded/weights.py", "on_stream"),
    "weight-gather": ("weight_sync/snapshot.py", "wait_for"),
    "weight-push-{}": ("weight_wire/device_lanes.py", "take_lane"),
    "weight-staging": ("weight_wire/staging.py", "_run"),
}
# They use none, or only through calls of torch that choose the tensor's device themselves.
ELSEWHERE = {
    "{}",  # an environment's, and those of a worker
    "embedded-engine", "weight-gather-source", "folder-lock", "log-limit", "lost-rank-end", "samples",
    "monitor", "orphan-reaper", "parent-watch", "phases", "rank-channel", "run-removal", "snapshot-copy",
    "stop-watch", "templates", "weight-checksums", "weight-encode", "weight-leave-{}", "weight-publisher",
    "weight-slots", "weight-write",
}  # fmt: skip


def test_every_thread_is_listed():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            call = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if re.match(r"(threading\.)?(Thread|ThreadPoolExecutor)\(", call):
                name = re.search(r"\b(?:thread_name_prefix|name)=(?:f?'(.*?)')?", call)
                found.add(re.sub(r"\{.*?\}", "{}", name[1] or "{}") if name else "without a name")
    assert found == ON_A_GPU.keys() | ELSEWHERE


def test_those_on_a_gpu_choose_it():
    for name, (file, function) in ON_A_GPU.items():
        (defined,) = (
            node
            for node in ast.walk(ast.parse((PACKAGE / file).read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == function
            and "torch.cuda.set_device" in ast.unparse(node)
        )  # fmt: skip
        assert defined, name
