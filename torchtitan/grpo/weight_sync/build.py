# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Puts the weight push together from the configuration."""

import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols import BaseStateDictAdapter
from torchtitan.tools.logging import logger

from torchtitan.grpo.config import Inference
from torchtitan.grpo.config_manager import JobConfig
from torchtitan.grpo.device import default_backend, gpus_for_servers
from torchtitan.grpo.inference.factory import make_client
from torchtitan.grpo.models.hf_weights import named_parameters
from torchtitan.grpo.rollout.link import RolloutLink, ServerInfo
from torchtitan.grpo.weight_sync.connection import ServerConnection
from torchtitan.grpo.weight_sync.gather import Gatherer
from torchtitan.grpo.weight_sync.publisher import WeightPublisher
from torchtitan.grpo.weight_sync.slots import SlotTable
from torchtitan.grpo.weight_sync.snapshot import Snapshots


def build_publisher(
    config: JobConfig,
    model_parts: list[nn.Module],
    adapter: BaseStateDictAdapter,
    device: torch.device,
    link: RolloutLink | None,
    servers: list[ServerInfo],
) -> WeightPublisher:
    """Builds one rank's publisher; collective over all ranks.

    Args:
        link: On rank 0, which leads; None elsewhere.
        servers: On rank 0, the servers to push to.
    """
    sync = config.weight_sync
    wire_dtype = TORCH_DTYPE_MAP[
        config.training.mixed_precision_param if sync.dtype == "auto" else sync.dtype
    ]
    backend = weight_backend(config, device.type)
    parameters = dict(named_parameters(model_parts))
    snapshots = Snapshots(parameters, sync.num_slots, wire_dtype, device)
    # A follower waits while the leader pushes the version before.
    patience_seconds = 10 * sync.timeout_seconds + 600
    gatherer = Gatherer(
        parameters,
        adapter,
        wire_dtype=wire_dtype,
        bucket_bytes=sync.bucket_bytes,
        backend=default_backend(device.type),
        timeout_seconds=patience_seconds,
        payload_device=device if backend == "nccl" else torch.device("cpu"),
        device=device,
    )
    if dist.get_rank() == 0:
        logger.info(
            "Weight sync: %d slots of %.3f GiB in all on this rank, %s over %s.",
            sync.num_slots, snapshots.num_bytes / 1024**3, wire_dtype, backend,
        )  # fmt: skip
    return WeightPublisher(
        snapshots=snapshots,
        slots=SlotTable(sync.num_slots),
        gatherer=gatherer,
        make_connections=_connections(config, servers, backend, device) if link else None,
        on_version=link.notify_version if link else _nobody,
        on_lost=link.notify_lost if link else _nobody,
        command_timeout_seconds=patience_seconds,
    )


def _nobody(url: str, what: object) -> None:
    """Followers have nobody to tell."""


def weight_backend(config: JobConfig, device_type: str) -> str:
    """Resolves ``weight_sync.backend``; see there."""
    if config.weight_sync.backend != "auto":
        return config.weight_sync.backend
    if device_type == "cpu" or config.inference.device == "cpu":
        return "gloo"
    # Launched servers share the trainer's GPUs unless there are some to spare, and NCCL
    # refuses two ranks on one GPU.
    _, are_their_own = gpus_for_servers()
    return "gloo" if config.inference.launch and not are_their_own else "nccl"


def client_for(inference: Inference, server: ServerInfo):
    """A client with the configured keys and timeouts."""
    return make_client(
        server.kind,
        server.url,
        api_key=inference.api_key,
        admin_key=inference.admin_key,
        control_timeout_seconds=inference.control_timeout_seconds,
    )


def _master_address(setting: str, server_url: str) -> str:
    """Resolves ``weight_sync.master_address``: this host's address on the way to a server."""
    if setting != "auto":
        return setting
    url = urlsplit(server_url)
    # Connecting a datagram socket sends nothing; it only asks for the route.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname or "127.0.0.1", url.port or 80))
        return probe.getsockname()[0]


def _connections(
    config: JobConfig, servers: list[ServerInfo], backend: str, device: torch.device
) -> Callable[[], list[ServerConnection]]:
    def make() -> list[ServerConnection]:
        return [
            ServerConnection(
                client_for(config.inference, server),
                master_address=_master_address(config.weight_sync.master_address, server.url),
                backend=backend,
                timeout_seconds=config.weight_sync.timeout_seconds,
                device=device if backend == "nccl" else torch.device("cpu"),
            )
            for server in servers
        ]

    return make
