# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps torchrun's agent from starting ranks again that have ended on purpose.

A guard stops a run so that the user looks at it, and a run whose last checkpoint found no room has
nothing else left to do. From the newest checkpoint either would come to the same place again, and
``--max-restarts`` is for ranks that die. The agent has no setting for
this, so its class is replaced where the launcher makes one.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from torchtitan.grpo.errors import FINAL_STATUSES


class _Agent(LocalElasticAgent):
    """An agent that restarts no ranks once one of its ranks has ended for good."""

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        statuses = {failure.exitcode for failure in result.failures.values()}
        if result.state is WorkerState.FAILED and statuses & {*FINAL_STATUSES}:
            self._remaining_restarts = 0
        return result


@contextlib.contextmanager
def respecting_final_statuses() -> Iterator[None]:
    """Makes agents that are launched in the block respect such an end."""
    upstream = api.LocalElasticAgent
    api.LocalElasticAgent = _Agent
    try:
        yield
    finally:
        api.LocalElasticAgent = upstream
