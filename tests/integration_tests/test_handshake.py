# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A trainer and a real server with different versions of NCCL, under each setting.

Neither has a GPU: the server is a real embedded one that claims to have another NCCL, and the
trainer's source rank claims one, too. What they then do is what they would do on GPUs.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedProcess
from lone_trainer import MODEL, PATIENCE, LoneTrainer, ask, wait_until
from server_kinds import held_port

from torchtitan.grpo.weight_sync.lane import WeightsRefused
from torchtitan.grpo.weight_sync.transports import group_transport
from torchtitan.grpo.weight_wire.group_facts import NCCL_SETTINGS, GroupFacts

TRAINER = GroupFacts("cuda", "2.13.0+cu130", "2.29.7", "GPU-a", dict.fromkeys(NCCL_SETTINGS, ""))
SERVER = replace(TRAINER, torch="2.14.1+cu130", nccl="2.30.7", gpu="GPU-b")


@pytest.fixture(scope="module")
def url(fork_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("server"), held_port()
    program = Path(__file__).parents[1] / "programs/claiming_server.py"
    arguments = [
        *(json.dumps(asdict(SERVER)), "--model-path", str(MODEL), "--device", "cpu"),
        *("--dtype", "float32", "--port", str(port), "--max-model-len", "64"),
    ]
    with (folder / "log").open("wb") as log:
        process: ForkedProcess = fork_server.start(
            program, arguments, environment=os.environ | {"OMP_NUM_THREADS": "1"},
            folder=folder, output=log,
        )  # fmt: skip
    try:
        wait_until(lambda: process.poll() is not None or is_up(port), "the server is up")
        assert process.poll() is None, (folder / "log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)


def is_up(port: int) -> bool:
    try:
        ask(f"http://127.0.0.1:{port}", "/health")
    except OSError:
        return False
    return True


@pytest.fixture
def claim(only_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_transport, "own_group_facts", lambda device: TRAINER)


@contextmanager
def training(url: str, folder: Path, transport: str) -> Iterator[LoneTrainer]:
    one = LoneTrainer([url], folder, transport=transport)
    try:
        yield one
    finally:
        one.publisher.close(15)


def test_auto_sends_from_host_memory_with_one_warning_however_often_the_server_joins(
    url, claim, tmp_path, caplog
):
    caplog.set_level(logging.WARNING)
    with training(url, tmp_path, "auto") as run:
        run.publish()
        run.assert_serves_newest(url)
        # The server drops its groups, so the next push fails and it is joined again.
        ask(url, "/leave_weight_groups", reason="a test")
        run.publish()
        run.assert_serves_newest(url)
        assert run.publisher.num_failures > 0
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = [message for message in messages if "receives weights" in message]
    assert f"{url} receives weights from host memory over gloo" in warning
    assert "the trainer has NCCL 2.29.7" in warning
    assert "the server has NCCL 2.30.7" in warning


def test_nccl_refuses_the_join_and_the_run_ends_with_both_versions_and_the_remedy(
    url, claim, tmp_path
):
    with training(url, tmp_path, "nccl") as run:
        run.publish()
        wait_until(lambda: run.publisher.error, f"a refusal within {PATIENCE:g} s")
        error = run.publisher.error
    assert isinstance(error, WeightsRefused)
    for part in (
        "cannot receive weights over NCCL, which weight_sync.transport = 'nccl' requires",
        "the trainer has NCCL 2.29.7 (torch 2.13.0+cu130)",
        "the server has NCCL 2.30.7 (torch 2.14.1+cu130)",
        "Install the same release of torch in both environments. Alternatively, set "
        "weight_sync.transport = 'auto' or 'host'.",
    ):
        assert part in str(error)
    assert ask(url, "/server_info")["weight_groups"] == []
