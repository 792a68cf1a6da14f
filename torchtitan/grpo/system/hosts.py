# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which ranks are on the same host."""

import socket

import torch.distributed as dist

from torchtitan.grpo.system.process_identity import boot_id


def agree_on_hosts() -> tuple[int, ...]:
    """Returns a number of its host for each rank, from 0; collective over all ranks."""
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, _host_name())
    return number_by_name([str(name) for name in names])


def number_by_name(names: list[str]) -> tuple[int, ...]:
    """Returns the same number for equal names, in the order of their first appearance."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def _host_name() -> str:
    # The second part tells hosts apart that have the same name.
    return f"{socket.gethostname()} {boot_id()}"
