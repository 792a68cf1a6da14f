# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Process groups between the trainer and one server, beside the default process group.

The trainer has rank 0, and the server's workers have the ranks after it. vLLM's workers call
these functions too, so this module needs only torch. SGLang's own implementation is compatible
with the rendezvous, so that the trainer treats all kinds of servers alike.

Neither side may end because the other one did. The watchdog thread of an NCCL group ends the
process when the group's peer is lost: whatever its settings, it sets a flag of the whole process,
on which the monitor of the *default* group acts. Groups with servers therefore have no
watchdog. Their users poll operations with their own deadlines, and abort the communicator.
"""

import ctypes
import functools
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed import distributed_c10d as c10d

from torchtitan.grpo.system.network import source_address
from torchtitan.grpo.weight_wire.group_facts import NCCL_SETTINGS, GroupFacts
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

# Torch reads it when a group is made. The name is misleading: if it is 1, the host waits in
# ``Work.wait()``, which nobody calls for these groups, and the group has no watchdog and no monitor
# of the watchdog.
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
# Seconds for which torch waits for a communicator that is made without blocking. It is half an hour
# unless it is set before the first collective of the process over NCCL, whichever group that is in.
_COMMUNICATOR_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
# Held while an NCCL group is made, because all threads have one environment.
_making = threading.Lock()
# Timeout of an NCCL operation for whoever waits for its Work, which nobody does for these groups.
_NO_TIMEOUT = timedelta(days=30)
# A broadcast to a server is not urgent. Each CTA takes a multiprocessor from training.
_MAX_CTAS = 4
_GLOO_ON_ROUTE = "gloo_on_route"


def create_weight_group(
    info: WeightGroupInfo, rank: int, store: dist.Store | None = None
) -> dist.ProcessGroup:
    """Joins a weight group; raises DistStoreError if not all members join in time.

    Over gloo it returns when all members have joined, and the group listens only on the address
    that leads to the trainer. Over NCCL it returns when this member has reached the store: the
    communicator is made at the first broadcast, and only :func:`destroy_weight_group` ends a
    collective. The trainer gives the ``store`` on which it listens; servers connect to it.
    """
    timeout = timedelta(seconds=info.timeout_seconds)
    if store is None:
        store = dist.TCPStore(
            info.master_address, info.master_port, info.world_size, is_master=False, timeout=timeout
        )
    store.set_timeout(timeout)
    backend, environment = info.backend, nullcontext()
    options: dict[str, Any] = {"timeout": timeout}
    if backend == "nccl":
        options = {"timeout": _NO_TIMEOUT, "backend_options": _nccl_options()}
        # These groups are made one at a time. Only a gloo group waits below for its members.
        environment = _nccl_environment(info.timeout_seconds)
    elif backend == "gloo":
        backend = _gloo_on_route()
        options["backend_options"] = source_address(info.master_address, info.master_port)
    with environment:
        group, _ = c10d._new_process_group_helper(
            info.world_size,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(info.group_name, store),
            group_name=info.group_name,  # pyright: ignore[reportArgumentType]  (a str by another name)
            **options,
        )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(info.world_size)}
    return group


@functools.cache
def _gloo_on_route() -> str:
    """Registers a gloo backend whose address can be chosen; torch uses one address for a whole process."""

    def make(options: Any, address: str) -> dist.ProcessGroupGloo:
        made: Any = dist.ProcessGroupGloo  # whose type stub lacks options
        gloo = made._Options()
        gloo._devices = [made.create_device(hostname=address)]
        gloo._timeout = options.timeout
        return made(options.store, options.group_rank, options.group_size, options=gloo)

    dist.Backend.register_backend(_GLOO_ON_ROUTE, make, extended_api=True, devices=["cpu"])
    return _GLOO_ON_ROUTE


def _nccl_options() -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NO_TIMEOUT
    options.config.min_ctas, options.config.max_ctas = 1, _MAX_CTAS
    # The communicator is made at the first broadcast, and a peer that is gone by then never answers.
    # NCCL would wait for it forever; in this mode torch waits, for as long as limit_communicators()
    # says. With NCCL 2.26, groups in this mode hung at random (pytorch/pytorch#153960), so that torch
    # no longer chooses it by itself; `check-gpu` sends many broadcasts to see whether they still do.
    options.config.blocking = 0
    return options


def limit_communicators(timeout_seconds: float) -> None:
    """Bounds the time in which a weight group's communicator over NCCL must be made.

    Torch reads the limit once, so call this before the process's first collective over NCCL in any group.
    Communicators in the blocking mode, such as training's, have no limit. A limit that the
    environment already sets stays.
    """
    os.environ.setdefault(_COMMUNICATOR_TIMEOUT, str(math.ceil(timeout_seconds)))


@contextmanager
def _nccl_environment(timeout_seconds: float) -> Iterator[None]:
    """Sets the variables without which an NCCL group gets a watchdog, and restores them after the block."""
    with _making:
        limit_communicators(timeout_seconds)  # for a process that had no reason to do so before
        former = os.environ.get(_NO_WATCHDOG)
        os.environ[_NO_WATCHDOG] = "1"
        try:
            yield
        finally:
            if former is None:
                del os.environ[_NO_WATCHDOG]
            else:
                os.environ[_NO_WATCHDOG] = former


def destroy_weight_group(group: dist.ProcessGroup) -> None:
    """Leaves a group. Aborts an NCCL communicator, without waiting for its operations.

    The abort may wait for the driver, so event loops must not call this function.
    """
    if group in c10d._world.pg_map:
        if dist.get_backend(group) == dist.Backend.NCCL:
            group.abort()
        dist.destroy_process_group(group)


_LIBRARY = "libnccl.so.2"


def own_group_facts(device: torch.device) -> GroupFacts:
    on_gpu = device.type == "cuda"
    return GroupFacts(
        device=device.type,
        # A plain string: its own type is a subclass, which vLLM's processes cannot send.
        torch=str(torch.__version__),
        nccl=nccl_version() if on_gpu else None,
        gpu=f"GPU-{torch.cuda.get_device_properties(device).uuid}" if on_gpu else None,
        settings={name: os.environ.get(name, "") for name in NCCL_SETTINGS},
    )


def nccl_version() -> str:
    """Returns the version of the NCCL that torch uses, such as ``2.29.7``, by asking the library.

    ``torch.cuda.nccl.version()`` is the one that torch was built with; images with SGLang or vLLM
    often hold a newer one.
    """
    try:
        # Torch has loaded it, so this is the same library and not a second one.
        library = ctypes.CDLL(_LIBRARY)
    except OSError:  # this torch contains its NCCL
        return ".".join(map(str, nccl.version()[:3]))
    code = ctypes.c_int()
    status = library.ncclGetVersion(ctypes.byref(code))
    assert status == 0, f"ncclGetVersion returned {status}"
    return version_text(code.value)


def version_text(code: int) -> str:
    """Returns ``2.29.7`` for NCCL's version code 22907."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
