# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Hides what earlier ranks left in torchrun's store from the ranks of a restart.

The agent's store outlives its ranks, and process groups write their members' addresses there. Restarted
ranks would find those of dead ranks (https://github.com/pytorch/pytorch/issues/135712). All ranks of one
start (a round) therefore prefix their keys with one name. The agents' counts of restarts would not do as
a name, because they may differ. Rank 0 draws the name at random. It gives the name to each rank that
answers under a random number of its own, which no earlier rank can have.
"""

import importlib
import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PREFIX = "torchtitan_grpo/round"
_POLL_SECONDS = 0.02


def separate_rounds() -> None:
    """Makes process groups use only this round's keys. Does nothing without an agent's store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return
    # Not `dist.rendezvous`, which is a function of the same name.
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    create = module._create_c10d_store

    def create_of_round(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *rest: bool
    ) -> dist.Store:
        store = create(hostname, port, rank, world_size, timeout, *rest)
        name = agree_on_round(store, rank, world_size, timeout.total_seconds())
        return dist.PrefixStore(f"{_PREFIX}/{name}", store)

    module._create_c10d_store = create_of_round


def agree_on_round(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Returns this round's name, the same on all ranks. Raises TimeoutError on rank 0 if a rank is missing."""
    if rank == 0:
        return _lead(store, world_size, timeout_seconds)
    own = secrets.token_hex(16)
    store.set(f"{_PREFIX}/of_rank/{rank}", own)
    name_key = f"{_PREFIX}/name_for/{own}"
    store.wait([name_key], timedelta(seconds=timeout_seconds))
    name = store.get(name_key).decode()
    store.set(f"{_PREFIX}/has_name/{own}", name)
    return name


def _lead(store: dist.Store, world_size: int, timeout_seconds: float) -> str:
    name = secrets.token_hex(16)
    missing = set(range(1, world_size))
    deadline = time.monotonic() + timeout_seconds
    while missing:
        for rank in sorted(missing):
            if not store.check([f"{_PREFIX}/of_rank/{rank}"]):
                continue
            # Perhaps still the number of an earlier rank, which does not answer any more.
            shown = store.get(f"{_PREFIX}/of_rank/{rank}").decode()
            store.set(f"{_PREFIX}/name_for/{shown}", name)
            has_key = f"{_PREFIX}/has_name/{shown}"
            if store.check([has_key]) and store.get(has_key).decode() == name:
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(
                f"All {world_size} training ranks must start within comm.init_timeout_seconds = "
                f"{timeout_seconds:g}, but ranks {sorted(missing)[:8]} have not started. Look for "
                "an earlier error in their output, or raise the setting."
            )
        time.sleep(_POLL_SECONDS if missing else 0)
    return name
