# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts this node's ranks of a run on several nodes, for `scripts/launch_multinode.sh`."""

import argparse
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torchtitan.grpo.config.command_line import ConfigError, without_torch
from torchtitan.grpo.run_folder.launch import LAUNCH_VARIABLE
from torchtitan.grpo.system.logs import outlive_readers
from torchtitan.grpo.system.network import address_of, interface_of, is_loopback, source_address
from torchtitan.grpo.system.waits import Reminders

_PORT = 29400  # torchrun's own default
_JOIN_SECONDS = 900.0
_RUN_ID = "torchtitan-grpo"
_CLOSE_SECONDS = 10
_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_RESOLVE_SECONDS = 1.0  # between two questions for the address of the endpoint


@dataclass(frozen=True)
class NodeOptions:
    """Options of `scripts/launch_multinode.sh`, from its command line and the environment.

    ``num_nodes`` is the lowest and the highest number of nodes. Without ``num_ranks``, there is one rank per
    visible GPU. Without ``interface``, the one with the route to the endpoint is used.
    """

    config_file: str
    num_nodes: tuple[int, int]
    endpoint: tuple[str, int]
    num_ranks: int | None
    interface: str | None
    max_restarts: int
    run_id: str
    join_seconds: float
    rest: list[str]


@dataclass(frozen=True)
class Place:
    """This node's network interface and address, and the endpoint. ``holds_store`` says if that is here."""

    interface: str
    address: str
    endpoint: tuple[str, int]
    holds_store: bool


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> NodeOptions:
    """Returns a command line's options; a mistake ends the process with status 2."""
    words = list(arguments)
    split = words.index("--") if "--" in words else len(words)
    words, rest = words[:split], words[split + 1 :]
    parser = _Parser(prog="launch_multinode.sh", allow_abbrev=False)
    add = parser.add_argument
    add("config_file", nargs="?", default=environ.get("GRPO_CONFIG"))
    add("--nnodes", default=environ.get("NNODES"))
    add("--rdzv-endpoint", default=environ.get("RDZV_ENDPOINT"))
    add("--nproc", default=environ.get("NPROC_PER_NODE"))
    add("--interface", default=environ.get("GRPO_INTERFACE") or None)
    add("--max-restarts", default=environ.get("MAX_RESTARTS") or "0")
    add("--rdzv-id", default=environ.get("RDZV_ID") or _RUN_ID)
    add("--join-timeout", default=environ.get("JOIN_TIMEOUT") or f"{_JOIN_SECONDS:g}")
    given = parser.parse_args(words)
    try:
        if given.config_file is None:
            raise ConfigError("A configuration must be named, as CONFIG.toml or in GRPO_CONFIG.")
        return NodeOptions(
            given.config_file,
            _nodes(given.nnodes),
            _endpoint(given.rdzv_endpoint),
            _count("--nproc (NPROC_PER_NODE)", given.nproc, 1) if given.nproc else None,
            given.interface,
            _count("--max-restarts (MAX_RESTARTS)", given.max_restarts, 0),
            given.rdzv_id,
            float(_count("--join-timeout (JOIN_TIMEOUT)", given.join_timeout, 1)),
            rest,
        )
    except ConfigError as error:
        parser.error(str(error))


def _count(name: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"{name} must be a number of at least {least}, got {value!r}.")
    return int(value)


def _nodes(value: str | None) -> tuple[int, int]:
    """Reads ``N`` or ``MIN:MAX``."""
    low, colon, high = (value or "").partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        raise ConfigError(
            f"--nnodes (NNODES) must be the number of nodes, or MIN:MAX, got {value!r}."
        )
    nodes = int(low), int(high) if colon else int(low)
    if not 1 <= nodes[0] <= nodes[1]:
        raise ConfigError(
            f"--nnodes (NNODES) must be at least 1, and MIN at most MAX, got {value}."
        )
    return nodes


def _endpoint(value: str | None) -> tuple[str, int]:
    """Reads ``HOST[:PORT]``; an IPv6 address stands in brackets."""
    host, _, port = (value or "").rpartition(":")
    if value and not value.endswith("]") and host:
        host = host.strip("[]")
    else:
        host, port = (value or "").strip("[]"), str(_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            "--rdzv-endpoint (RDZV_ENDPOINT) must be HOST:PORT, the same on all nodes, where HOST is "
            f"one of them, got {value!r}."
        )
    return host, int(port)


def find_place(options: NodeOptions) -> Place:
    """Finds this node's interface and address. Raises ConfigError if they or the endpoint are unusable."""
    host, port = options.endpoint
    target = _resolve(host, port, options.join_seconds)
    try:
        route = source_address(str(target), port)
        address = address_of(options.interface) if options.interface else route
    except OSError as error:
        raise ConfigError(
            f"--rdzv-endpoint must name a host to which a route leads, got {host!r}: {error}. Give "
            "its address, or check the name and the network."
        ) from error
    except ValueError as error:
        raise ConfigError(f"--interface (GRPO_INTERFACE): {error}") from error
    holds_store = interface_of(str(target)) is not None
    if options.num_nodes[1] > 1 and is_loopback(address):
        raise ConfigError(
            f"--rdzv-endpoint {host} is {target} on this host, which other nodes cannot reach. Give "
            "the address by which they reach it; hosts often list their own name as 127.0.1.1."
        )
    interface = interface_of(address)
    assert interface is not None, f"{address} was found on this host"
    return Place(interface, address, (str(target), port), holds_store)


def _resolve(host: str, port: int, patience_seconds: float) -> str:
    """Resolves the endpoint's host name, with retries for ``patience_seconds``.

    A cluster may start that host, or register its name, later than it starts this node.
    """
    begin, reminders = time.monotonic(), Reminders()
    while True:
        try:
            return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            waited = time.monotonic() - begin
            if waited >= patience_seconds:
                raise ConfigError(
                    f"--rdzv-endpoint must name a host whose address is known on this node, got "
                    f"{host!r}: {error}, for {waited:.0f} s (--join-timeout). Give its address, or "
                    "check the name and the network."
                ) from error
            if reminders.is_due(waited):
                say(
                    f"this node has waited {waited:.0f} s (at most {patience_seconds:g} s, "
                    f"--join-timeout) for the address of {host}: {error}"
                )
        time.sleep(min(_RESOLVE_SECONDS, max(0.0, patience_seconds - waited)))


def run_node(options: NodeOptions) -> int:
    with without_torch():
        from torchtitan.grpo.config.command_line.reading import read_config

    words = ["--job.config_file", options.config_file, *options.rest]
    os.environ[LAUNCH_VARIABLE] = launch_command(options)
    stop_seconds = read_config(words).grpo.stop_timeout_seconds
    place = find_place(options)
    # On other nodes, torch's store prints pages of warnings when the endpoint ends.
    given = os.environ.get(_CPP_LOG_LEVEL)
    os.environ.setdefault(_CPP_LOG_LEVEL, "ERROR")
    import torch  # reads the level as it is loaded

    if given is None:
        del os.environ[_CPP_LOG_LEVEL]  # ranks inherit this environment
    num_ranks = options.num_ranks or torch.cuda.device_count() or 1
    _describe(options, place, num_ranks)
    # What a user has set stays, for hosts whose GPUs have networks of their own.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", place.interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={place.interface}")  # "=": not as a prefix
    return _run_ranks(options, place, num_ranks, words, stop_seconds)


def launch_command(options: NodeOptions) -> str:
    """Returns the command that starts this node again, up to the settings after the two dashes."""
    low, high = options.num_nodes
    words = ["bash", "scripts/launch_multinode.sh", options.config_file]
    words += ["--nnodes", f"{low}" if low == high else f"{low}:{high}"]
    host, port = options.endpoint
    words += ["--rdzv-endpoint", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
    if options.num_ranks is not None:
        words += ["--nproc", str(options.num_ranks)]
    if options.interface is not None:
        words += ["--interface", options.interface]
    if options.max_restarts:
        words += ["--max-restarts", str(options.max_restarts)]
    if options.run_id != _RUN_ID:
        words += ["--rdzv-id", options.run_id]
    if options.join_seconds != _JOIN_SECONDS:
        words += ["--join-timeout", f"{options.join_seconds:g}"]
    return shlex.join(words)


def _run_ranks(
    options: NodeOptions, place: Place, num_ranks: int, words: list[str], stop_seconds: float
) -> int:
    from torch.distributed.elastic.rendezvous import RendezvousError, rendezvous_handler_registry

    from torchtitan.grpo.start.rendezvous import BACKEND, Node, NodeRendezvous
    from torchtitan.grpo.start.torchrun import run_agent

    node = Node(place.address, place.endpoint, place.holds_store, num_ranks, options.join_seconds)
    rendezvous_handler_registry.register(BACKEND, lambda p: NodeRendezvous(node, p, say))
    waits = {"join_timeout": int(options.join_seconds), "close_timeout": _CLOSE_SECONDS}
    try:
        return run_agent(
            words,
            stop_seconds,
            min_nodes=options.num_nodes[0],
            max_nodes=options.num_nodes[1],
            nproc_per_node=num_ranks,
            run_id=options.run_id,
            rdzv_backend=BACKEND,
            rdzv_endpoint="{}:{}".format(*place.endpoint),
            rdzv_configs=waits,
            local_addr=place.address,
            max_restarts=options.max_restarts,
        )
    except (RendezvousError, OSError, TimeoutError) as error:
        host, port = place.endpoint
        print(
            f"error: The rendezvous at {host}:{port} failed: {type(error).__name__}: {error} Check "
            "the node there, and that port; then start the same command again on each node that "
            "has ended.",
            file=sys.stderr,
        )
        return 1


def _describe(options: NodeOptions, place: Place, num_ranks: int) -> None:
    host, port = place.endpoint
    low, high = options.num_nodes
    nodes = "1 node" if high == 1 else f"{low} nodes" if low == high else f"{low} to {high} nodes"
    say(f"host {socket.gethostname()}, interface {place.interface}, address {place.address}")
    where = "on this node" if place.holds_store else "on another node"
    say(f"rendezvous at {host}:{port} ({where}), run {options.run_id!r}, {nodes}")
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    say(f"{ranks} on this node, started again at most {options.max_restarts} times")


def say(text: str) -> None:
    print(f"[launch] {text}", flush=True)


def main() -> None:
    outlive_readers()
    try:
        status = run_node(parse(sys.argv[1:], os.environ))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
