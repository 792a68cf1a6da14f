# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Every thread of the package that uses a GPU chooses it first; a new thread must be listed here."""

import ast
from pathlib import Path

import torchtitan.grpo

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
