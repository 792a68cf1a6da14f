# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""`benchmarks/soak.py` for an hour with each real server, and its findings in measures that grow."""

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/soak.py"
SECONDS = float(os.environ.get("TORCHTITAN_GRPO_SOAK_SECONDS", "3600"))


@pytest.mark.long
@pytest.mark.timeout(int(SECONDS) + 1800)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def test_nothing_grows_and_nothing_is_lost_in_a_long_run_among_faults(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kind", kind, "--seconds", str(SECONDS), "--json"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["faults/ranks killed"] == 2
    assert figures["faults/servers killed"] and figures["faults/servers stopped"]


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    sys.path.append(str(SCRIPT.parent))  # it imports others of its folder
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def measured(soak: ModuleType, **change: Any) -> list[str]:
    """Returns the problems of two ranks, a rollout process and one process that may change."""
    made = soak.Soak(None, 100.0, random.Random(0), None)
    made.measured_from = 50.0
    shapes = {"rank": {}, "rank 2": {}, "rollout process": {}, "server": change}
    for pid, (name, grows) in enumerate(shapes.items()):
        life = made.lives[pid, 0.0]
        life.name = name.removesuffix(" 2")
        for index in range(50):
            late = index >= 25
            # Noise comes and goes: what counts is the value to which a number falls back.
            fds, threads = 40 + index % 3, 20 + index % 2
            life.samples.append(
                (
                    50.0 + index,
                    100.0 + (index % 5) / 10 + (grows.get("mib", 0.0) if late else 0.0),
                    fds + (grows.get("fds", 0) if late else 0),
                    threads + (grows.get("threads", 0) if late else 0),
                )
            )
    return soak.judge(made, 100.0)[1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"mib": 1.5}, None),
        ({"mib": 2.5}, "memory of a server grew by 2.6 %"),
        ({"fds": 1}, "of a server changed by +1 and +0"),
        ({"threads": 2}, "of a server changed by +0 and +2"),
        ({"mib": -30.0, "fds": -3}, None),
    ],
)
def test_what_grows_is_found(soak: ModuleType, change: dict[str, float], problem: str | None):
    problems = measured(soak, **change)
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def test_a_connection_counts_as_a_request_until_one_side_closes_it(soak: ModuleType) -> None:
    process = psutil.Process()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        before, none = soak.descriptors(process, {port})
        assert none == 0
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = listener.accept()
            assert soak.descriptors(process, {port}) == (before, 2)
            assert soak.descriptors(process, set()) == (before + 2, 0)
            client.close()
            with served:  # kept, although its other side is closed
                assert served.recv(1) == b""
                assert soak.descriptors(process, {port}) == (before + 1, 0)
        assert soak.descriptors(process, {port}) == (before, 0)
