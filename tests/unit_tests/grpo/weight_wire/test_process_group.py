# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Groups over NCCL are made so that no watchdog ends a process. NCCL itself is not needed here."""

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchtitan.grpo.weight_wire.process_group import PASSIVE_WATCHDOG, create_weight_group


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
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    return seen


def create(backend: str) -> None:
    create_weight_group("127.0.0.1", 0, 0, 1, "group", backend, 7.0, store=dist.HashStore())


def test_over_nccl_the_watchdog_is_passive_and_training_groups_keep_theirs(made):
    create("nccl")
    assert PASSIVE_WATCHDOG.items() <= made["environment"].items()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
    options = made["backend_options"]
    # Far beyond any push, whose deadlines end it in an orderly way.
    assert options._timeout == made["timeout"] >= timedelta(days=1)
    assert 1 <= options.config.min_ctas <= options.config.max_ctas <= 8


def test_over_gloo_the_timeout_is_that_of_the_push(made):
    create("gloo")
    assert made["timeout"] == timedelta(seconds=7.0)
    assert "backend_options" not in made
    assert made["environment"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
