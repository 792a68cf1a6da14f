# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks settings of the servers, and of the push of weights to them."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from torchtitan.grpo import config as grpo_config
from torchtitan.grpo.config.cluster import count_servers, server_groups
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import check_file, refusing, require
from torchtitan.grpo.inference.access import ADMIN_KEY_VARIABLE
from torchtitan.grpo.inference.kinds import KINDS, kind_row, refuse_keys
from torchtitan.grpo.inference.registry import registry_folder
from torchtitan.grpo.inference.urls import checked_host, named_urls, split_address
from torchtitan.grpo.system.network import is_loopback


def check_inference(config: JobConfig) -> None:
    if not config.has_servers:
        return
    inference = config.inference
    sources = {
        "inference.launch = true": inference.launch,
        "inference.urls": bool(inference.urls),
        "inference.urls_file": inference.urls_file is not None,
        "inference.registry": registry_folder(inference, config.job.dump_folder) is not None,
    }
    given = [name for name, is_given in sources.items() if is_given]
    require(
        len(given) == 1,
        "Set exactly one of inference.launch = true, inference.urls, inference.urls_file and "
        "inference.registry (or inference.registry_address), got "
        + (f"{' and '.join(given)}." if given else "none of them."),
    )
    check_file("inference.urls_file", inference.urls_file)
    with refusing():
        urls, row = named_urls(inference), kind_row(inference.kind)
    _check_registry(inference)
    _check_reachable(urls)
    needs_python = inference.launch and row.environment is not None
    require(
        not needs_python or inference.python is not None,
        f"inference.launch with inference.kind = {inference.kind!r} needs inference.python, the "
        f"interpreter of its environment: run `bash {row.install_script}` and set "
        f"inference.python = '{row.environment}/bin/python'.",
    )
    if inference.launch:
        with refusing():
            refuse_keys(inference.extra_args, "inference.extra_args")
        require(
            inference.max_restart_seconds >= inference.restart_seconds,
            "inference.max_restart_seconds must be at least inference.restart_seconds "
            f"({inference.restart_seconds:g}), from which the pause grows, got "
            f"{inference.max_restart_seconds:g}.",
        )
    check_batched_tokens(config)
    python = inference.python
    require(
        python is None or os.access(python, os.X_OK),
        f"inference.python must be an executable file, got {python}.",
    )


def check_batched_tokens(config: JobConfig) -> None:
    num_servers = max(1, count_servers(server_groups(config)))
    running = -(-config.rollout.max_concurrent_rollouts // num_servers)
    budget = config.inference.max_batched_tokens
    require(
        not config.inference.launch or budget == 0 or budget > running,
        f"inference.max_batched_tokens must be 0 or above {running}, the completions that a server "
        f"samples at once (rollout.max_concurrent_rollouts, divided by {num_servers} servers), got {budget}.",
    )


def _check_registry(inference: grpo_config.Inference) -> None:
    address = inference.registry_address
    if address is None:
        return
    with refusing(
        "inference.registry_address must be host:port, where host is the address of rank 0's host "
        f"that servers reach, got {address!r}"
    ):
        host, _ = split_address(address)
        if host in ("0.0.0.0", "::"):
            raise ValueError("servers cannot connect to all addresses")
    require(
        bool(inference.admin_key or os.environ.get(ADMIN_KEY_VARIABLE)),
        "inference.registry_address needs a key, which servers send when they register: set "
        f"{ADMIN_KEY_VARIABLE} for the trainer and for the servers.",
    )


def _check_reachable(urls: list[str]) -> None:
    if os.environ.get("LOCAL_WORLD_SIZE") in (None, os.environ.get("WORLD_SIZE")):
        return
    hidden = [url for url in urls if is_loopback(urlsplit(url).hostname or "")]
    require(
        not hidden,
        "inference.urls must be addresses that all nodes of a run on several nodes reach, got "
        f"{', '.join(hidden)}. Start the servers with --host and the address of their host.",
    )


_LAUNCH_ONLY = (
    "num_servers", "python", "device", "dtype", "max_batched_tokens", "extra_args", "max_restarts",
    "restart_seconds", "max_restart_seconds",
)  # fmt: skip
"""Further keys of ``[inference]`` for launched servers, harmless beside running ones."""


def unused_server_settings(config: JobConfig) -> list[str]:
    """Returns a warning if settings of launched servers are set, but no server is launched."""
    inference, defaults = config.inference, grpo_config.Inference()
    if inference.launch or not config.has_servers:
        return []
    unused = [k for k in _LAUNCH_ONLY if getattr(inference, k) != getattr(defaults, k)]
    if not unused:
        return []
    source = "inference.urls" if inference.urls else "inference.urls_file"
    if registry_folder(inference, config.job.dump_folder) is not None:
        source = "inference.registry"
    keys = ", ".join(f"inference.{key}" for key in unused)  # values may hold a server's key
    return [
        f"Nothing reads {keys}, because inference.launch is false: the servers of {source} run "
        "with the options that they were started with. Remove what is not read, or start these "
        "servers with it."
    ]


def check_weight_sync(config: JobConfig) -> None:
    sync = config.weight_sync
    require(
        sync.max_retry_seconds >= sync.retry_seconds,
        f"weight_sync.max_retry_seconds must be at least weight_sync.retry_seconds "
        f"({sync.retry_seconds:g}), from which the pause grows, got {sync.max_retry_seconds:g}.",
    )
    require(
        sync.transport != "disk" or sync.disk_path is not None,
        "weight_sync.transport = 'disk' needs weight_sync.disk_path, a directory that trainer and "
        "servers share, got none.",
    )
    require(
        sync.transport != "nccl" or config.inference.device != "cpu",
        "weight_sync.transport = 'nccl' needs servers on GPUs, got inference.device = 'cpu'. Set "
        "weight_sync.transport = 'auto' or 'host'.",
    )
    if sync.master_address != "auto":
        with refusing(
            "weight_sync.master_address must be auto, or an address of rank 0's host without scheme, "
            f"brackets and port, got {sync.master_address!r}"
        ):
            checked_host(sync.master_address)
    path = sync.disk_path
    require(
        path is None or Path(path).is_dir() or not Path(path).exists(),
        f"weight_sync.disk_path must be a directory, got the file {path}.",
    )
    with refusing():
        kind = kind_row(config.inference.kind).name
    for key, capability in (("delta", "takes_deltas"), ("checksum", "verifies_checksums")):
        able = [row.name for row in KINDS.values() if getattr(row.capabilities, capability)]
        require(
            kind in able or not getattr(sync, key),
            f"weight_sync.{key} needs inference.kind = {' or '.join(map(repr, able))}, got "
            f"{kind!r}, whose servers would ignore it. Leave weight_sync.{key} at false.",
        )
