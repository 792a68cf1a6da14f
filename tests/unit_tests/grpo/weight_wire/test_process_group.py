# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Groups over NCCL are made so that no watchdog ends a process. NCCL itself is not needed here."""

import os
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchtitan.grpo.weight_wire.process_group import (
    create_weight_group,
    destroy_weight_group,
    limit_communicators,
)
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo


class NCCLOptions:
    def __init__(self) -> None:
        self.config = SimpleNamespace(min_ctas=0, max_ctas=0)
        self._timeout = timedelta(minutes=10)


@pytest.fixture
def made(monkeypatch) -> dict[str, Any]:
    """What the last group was made with, and in which environment."""
    seen: dict[str, Any] = {}

    def make(*args: Any, **kwargs: Any) -> Any:
        seen.update(kwargs, environment=dict(os.environ))
        return dist.ProcessGroup(dist.HashStore(), 0, 1), None

    monkeypatch.setattr(c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", SimpleNamespace(Options=NCCLOptions), raising=False
    )
    # As torchtitan sets it, which ends the process at an error.
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    # Kept in the environment, so that this test's end removes it.
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "")
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT")
    return seen


def create(backend: str) -> None:
    info = WeightGroupInfo("127.0.0.1", 0, 1, 1, "group", backend, 7.0)
    create_weight_group(info, 0, dist.HashStore())


def test_over_nccl_there_is_no_watchdog_and_training_groups_keep_theirs(made):
    create("nccl")
    # The setting with which torch starts neither the watchdog nor its monitor.
    assert made["environment"]["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    options = made["backend_options"]
    # Far beyond any push, whose deadlines end it in an orderly way.
    assert options._timeout == made["timeout"] >= timedelta(days=1)
    assert 1 <= options.config.min_ctas <= options.config.max_ctas <= 8
    # A peer that never answers is given up when the push's time is over.
    assert options.config.blocking == 0
    assert made["environment"]["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7"


@pytest.mark.parametrize("former", [None, "0"])
def test_groups_that_are_made_at_once_leave_the_environment_as_it_was(made, monkeypatch, former):
    if former is None:
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    else:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", former)
    environments = []

    def make(*args: Any, **kwargs: Any) -> Any:
        environments.append(os.environ["TORCH_NCCL_BLOCKING_WAIT"])
        time.sleep(0.02)
        environments.append(os.environ["TORCH_NCCL_BLOCKING_WAIT"])
        return dist.ProcessGroup(dist.HashStore(), 0, 1), None

    monkeypatch.setattr(c10d, "_new_process_group_helper", make)
    threads = [threading.Thread(target=create, args=("nccl",)) for _ in range(4)]
    for i, thread in enumerate(threads):
        thread.start()
        time.sleep(0.005 * i)
    for thread in threads:
        thread.join()
    assert environments == ["1"] * 8
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == former


def test_over_gloo_the_timeout_is_that_of_the_push(made):
    create("gloo")
    assert made["timeout"] == timedelta(seconds=7.0)
    assert made["backend_options"] == "127.0.0.1"
    assert made["environment"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_a_gloo_group_listens_on_the_address_that_leads_to_the_trainer_alone(monkeypatch):
    # Another address of this host than the interface names, and than its name resolves to.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    store = dist.TCPStore(
        "127.0.0.77", 0, is_master=True, wait_for_workers=False,
        master_listen_fd=(listener := socket.create_server(("127.0.0.77", 0))).detach(),
    )  # fmt: skip
    assert listener.fileno() == -1, "the store owns the socket"
    info = WeightGroupInfo("127.0.0.77", store.port, 1, 1, "g", "gloo", 7.0)
    group = create_weight_group(info, 0, store)
    try:
        listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
        assert listening <= {"127.0.0.77", "127.0.0.1"}, listening
    finally:
        destroy_weight_group(group)


def test_the_time_for_a_communicator_is_that_of_the_first_call_or_of_the_user(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "")
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT")
    for seconds in (33.2, 7.0):
        limit_communicators(seconds)
        assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "34"
