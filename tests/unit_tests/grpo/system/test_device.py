# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Choices that depend on GPUs and on the number of machines, also of each thread."""

import ast
import os
from pathlib import Path

import pytest
import torch

import torchtitan.grpo
from torchtitan.grpo.system.device import (
    are_gpus_shared,
    choose_interfaces,
    gpus_for_servers,
    settle_device,
)


@pytest.mark.parametrize(
    ("variable", "default", "other"),
    [("CUDA_DEVICE_MAX_CONNECTIONS", "32", "1"), ("CUDA_MODULE_LOADING", "EAGER", "LAZY")],
)
def test_cuda_is_set_so_that_training_waits_for_no_push_unless_the_user_says_otherwise(
    variable, default, other, monkeypatch
):
    monkeypatch.setenv(variable, other)
    settle_device()
    assert os.environ[variable] == other
    monkeypatch.delenv(variable)
    settle_device()
    assert os.environ[variable] == default


@pytest.mark.parametrize(
    ("visible", "local_ranks", "expected"),
    [
        (None, "2", ["2", "3"]),
        (None, "4", ["0", "1", "2", "3"]),
        ("5,7,9", "1", ["7", "9"]),
        ("5", "1", ["5"]),
    ],
)
def test_servers_get_the_gpus_that_the_ranks_leave(visible, local_ranks, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_for_servers() == expected


def test_servers_share_the_gpus_of_training_where_no_other_is_left(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for local_ranks, are_shared in (("1", False), ("2", True)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
        assert are_gpus_shared() is are_shared


def test_without_gpus_servers_get_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpus_for_servers() == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not are_gpus_shared()


@pytest.mark.parametrize(
    ("world", "local", "gloo", "nccl"), [("2", "2", "lo", None), ("4", "2", "lo", "=lo")]
)
def test_the_ranks_groups_use_one_interface(world, local, gloo, nccl, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # so that the route is over loopback here
    monkeypatch.setenv("MASTER_PORT", "29400")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "y")
    choose_interfaces()
    chosen = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    assert list(chosen.values()) == ["x", "y"]  # a user's choice stays
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
    "{}",  # an environment's
    "embedded-engine", "weight-gather-source", "folder-lock", "log-limit", "lost-rank-end",
    "monitor", "orphan-reaper", "parent-watch", "rank-channel", "run-removal", "snapshot-copy",
    "stop-watch", "verifiers", "weight-encode", "weight-leave-{}", "weight-publisher",
    "weight-slots", "weight-write",
}  # fmt: skip


def name_of(call: ast.Call) -> str | None:
    callee = ast.unparse(call.func)
    if callee not in ("threading.Thread", "Thread", "ThreadPoolExecutor"):
        return None
    for keyword in call.keywords:
        if keyword.arg in ("name", "thread_name_prefix"):
            return text_of(keyword.value)
    return "without a name"


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{}" if isinstance(v, ast.FormattedValue) else text_of(v) for v in node.values
        )
    return "{}"


def test_every_thread_is_listed():
    trees = [ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert {name_of(call) for call in calls} - {None} == ON_A_GPU.keys() | ELSEWHERE


def test_those_on_a_gpu_choose_it():
    for name, (file, function) in ON_A_GPU.items():
        (defined,) = (
            node
            for node in ast.walk(ast.parse((PACKAGE / file).read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == function
            and "torch.cuda.set_device" in ast.unparse(node)
        )  # fmt: skip
        assert defined, name
