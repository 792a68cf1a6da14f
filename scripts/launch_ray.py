#!/usr/bin/env python3
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs training and inference on a Ray cluster, and replaces trainers and servers that die.

    python scripts/launch_ray.py CONFIG.toml --nnodes 2 --nproc 8 \\
        --servers 8 --server-model path/to/model [-- --table.key value ...]

Ray only decides on which nodes trainers and servers run. On each training node, an actor starts
`scripts/launch_multinode.sh`, and for each server, another actor starts `scripts/serve_node.sh`, as
a user would by hand. The script needs only Ray and the standard library, so it runs in the
environment of any Ray cluster. Trainers and servers run in environments of their own. All nodes
need this repository and its environments at the same path, and share job.dump_folder and the
registry of servers.

An actor that is lost is placed again. A server joins the run again by itself. If a training node is
lost or fails, all training nodes end and start again from the newest checkpoint, because the
collectives of the remaining nodes have failed as well; the servers stay. Ranks that fail on a node
that is alive are started again there (``--max-restarts``) without Ray.
"""

import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

REPOSITORY = Path(__file__).resolve().parents[1]
KEYS = ("TORCHTITAN_GRPO_API_KEY", "TORCHTITAN_GRPO_ADMIN_KEY")
ATTEMPT = "GRPO_RAY_PROCESS"
"""Variable that names the actor that started a process. A later actor of this name ends it."""

LAUNCH_ID = "TORCHTITAN_GRPO_LAUNCH_ID"
"""Variable that tells trainers that are started again, for which job.overwrite counts no more."""

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.2
_NO_PLACE_SECONDS = 60.0
# Status of a run that cannot be started. Starting it again would not help.
_REFUSED = 2


class NodeProcess:
    """An actor that runs one command where Ray has placed it.

    Args:
        name: Name of the command in the run. An actor that replaces this one has the same name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen | None = None
        self._stopped = False

    def where(self) -> tuple[str, int, int]:
        """Returns the address of this node, a free port there, and this actor's process id."""
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as probe:
            return address, probe.getsockname()[1], os.getpid()

    def run(
        self, command: list[str], environment: dict[str, str], folder: str, patience_seconds: float
    ) -> int:
        """Runs a command; returns its exit status.

        Args:
            command: Program and arguments.
            environment: Variables that are added to this actor's environment, which names its GPUs.
            folder: Working directory.
            patience_seconds: Maximum time for the processes of an earlier actor to end.
        """
        end_leftovers(self._name, patience_seconds)
        if self._stopped:
            return 128 + signal.SIGTERM
        self._process = subprocess.Popen(
            command,
            env=os.environ | environment | {ATTEMPT: self._name},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # If the actor is killed, its command ends as well.
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        status = self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return status if status >= 0 else 128 - status

    def stop(self, patience_seconds: float) -> None:
        """Ends the command in order, and kills it if that takes too long."""
        self._stopped = True
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)


def end_leftovers(name: str, patience_seconds: float) -> None:
    """Waits until no process of an earlier actor of this name is left on this node.

    Such a process has received SIGTERM when its actor died, and may be saving a checkpoint. Two
    runs in one folder would spoil it.
    """
    deadline = time.monotonic() + patience_seconds
    while left := _processes_of(name):
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _processes_of(name: str) -> list[int]:
    wanted = f"{ATTEMPT}={name}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not is_zombie and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@dataclass
class Placed:
    """An actor, its place, and the command that it runs.

    Attributes:
        name: Name of the actor, such as ``server-0``.
        group: Placement group.
        bundle: Index of the bundle within the group.
        num_gpus: GPUs of the bundle.
        num_cpus: CPUs of the bundle.
        actor: Handle of the actor that was placed last.
        result: Future of the command's exit status.
        num_starts: Number of times that an actor was placed.
    """

    name: str
    group: PlacementGroup
    bundle: int
    num_gpus: float
    num_cpus: float
    actor: Any = None
    result: Any = None
    num_starts: int = 0

    def place(self, timeout_seconds: float) -> tuple[str, int]:
        """Starts an actor in the bundle; returns its node's address and a free port there.

        Raises:
            TimeoutError: If Ray has no room for it in time.
        """
        if not self.group.wait(timeout_seconds):
            raise TimeoutError(
                f"Ray must have room for {self.name} within {timeout_seconds:g} s: "
                f"{self.group.bundle_specs}, strategy {self.group.strategy}. The cluster has "
                f"{ray.cluster_resources()}, of which {ray.available_resources()} are free."
            )
        remote = ray.remote(NodeProcess).options(
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus,
            max_concurrency=3,  # `stop` while `run` waits
            max_restarts=0,  # this script places the actor again, and gives it its command
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, self.bundle),
        )
        self.actor = remote.remote(self.name)
        self.num_starts += 1
        address, port, pid = ray.get(self.actor.where.remote(), timeout=timeout_seconds)
        again = "" if self.num_starts == 1 else " again"
        say(f"{self.name} is placed{again} at {address} (process {pid})")
        return address, port

    def start(
        self, command: Sequence[str], environment: dict[str, str], patience_seconds: float
    ) -> None:
        """Runs a command in the actor."""
        self.result = self.actor.run.remote(
            list(command), environment, os.getcwd(), patience_seconds
        )

    def outcome(self) -> int | None:
        """Returns the exit status of a command that has ended; ``None`` if the actor is lost."""
        try:
            return ray.get(self.result)
        except RayError as error:
            say(f"{self.name} is lost: {str(error).splitlines()[0]}")
            return None

    def release(self) -> None:
        """Ends the actor. Its command has ended, or the actor cannot be reached."""
        with contextlib.suppress(RayError):
            ray.kill(self.actor)


@dataclass
class Launch:
    """A run on a Ray cluster.

    Attributes:
        options: The command line.
        rest: Further arguments of the trainer.
        trainers: The actors of the training nodes.
        servers: The actors of the servers that may still be placed.
        stop_signal: The signal that asked this script to end, or ``None``.
        statuses: Exit statuses of training nodes that have ended.
        name: Name of the run, by which trainers that are placed again know that it is theirs.
    """

    options: argparse.Namespace
    rest: list[str]
    trainers: list[Placed] = field(default_factory=list)
    servers: list[Placed] = field(default_factory=list)
    stop_signal: int | None = None
    statuses: dict[str, int] = field(default_factory=dict)
    name: str = field(default_factory=lambda: f"ray-{secrets.token_hex(8)}")

    def run(self) -> int:
        """Places everything and watches it; returns the exit status of the run."""
        self._reserve()
        for server in self.servers:
            self._start_server(server)
        self._start_trainers()
        try:
            return self._watch()
        finally:
            # The servers end after the trainers, because the rollouts that trainers save beside a
            # checkpoint come from servers.
            self._stop(self.trainers)
            self._stop(self.servers)

    def _reserve(self) -> None:
        """Reserves a machine for each training node, and a place on any machine for each server."""
        given = self.options
        bundle = {"CPU": given.cpus_per_node, "GPU": self._gpus_per_node()}
        group = placement_group(
            [{name: number for name, number in bundle.items() if number}] * given.nnodes,
            strategy="STRICT_SPREAD",
        )
        for index in range(given.nnodes):
            name = f"trainer-{index}"
            self.trainers.append(
                Placed(name, group, index, self._gpus_per_node(), given.cpus_per_node)
            )
        gpus, cpus = given.gpus_per_server, given.cpus_per_server
        bundle = {"CPU": cpus, "GPU": gpus}
        for index in range(given.servers):
            # Each server has a placement group of its own, so that one without room does not delay
            # others.
            group = placement_group([{name: n for name, n in bundle.items() if n}])
            self.servers.append(Placed(f"server-{index}", group, 0, gpus, cpus))

    def _gpus_per_node(self) -> float:
        given = self.options
        return given.nproc if given.gpus_per_node is None else given.gpus_per_node

    def _start_server(self, server: Placed) -> None:
        given = self.options
        address, _ = server.place(given.place_timeout)
        environment = self._common() | {
            "SERVER_HOST": address,
            "SERVER_KIND": given.server_kind,
        }
        command = ["bash", str(REPOSITORY / "scripts/serve_node.sh"), given.server_model]
        server.start([*command, *given.server_args.split()], environment, given.stop_timeout)

    def _start_trainers(self) -> None:
        given = self.options
        places = [trainer.place(given.place_timeout) for trainer in self.trainers]
        self.statuses.clear()
        environment = self._common() | {
            "NNODES": str(given.nnodes),
            "NPROC_PER_NODE": str(given.nproc),
            "RDZV_ENDPOINT": "{}:{}".format(*places[0]),
            "RDZV_ID": f"ray-{self.trainers[0].num_starts}",
            "MAX_RESTARTS": str(given.max_restarts),
            LAUNCH_ID: self.name,
        }
        words = list(self.rest)
        if self.servers:
            words = [
                *("--inference.kind", given.server_kind, "--inference.no-launch"),
                *("--inference.registry", given.registry, *words),
            ]
        script = str(REPOSITORY / "scripts/launch_multinode.sh")
        for trainer in self.trainers:
            trainer.start(
                ["bash", script, given.config, "--", *words], environment, given.stop_timeout
            )

    def _common(self) -> dict[str, str]:
        passed = {name: os.environ[name] for name in KEYS}
        return passed | {"GRPO_REGISTRY": self.options.registry}

    def _watch(self) -> int:
        """Waits until training ends; returns the exit status of the run."""
        while self.stop_signal is None:
            running = {p.result: p for p in [*self.trainers, *self.servers] if p.result is not None}
            for result in ray.wait(list(running), timeout=1.0)[0]:
                placed = running[result]
                status = placed.outcome()
                placed.result = None
                if placed in self.servers:
                    self._server_ended(placed, status)
                    continue
                # A lost node has no exit status.
                self.statuses[placed.name] = 1 if status is None else status
                if status == 0 and len(self.statuses) < len(self.trainers):
                    continue
                if status == 0 or not self._begin_again(placed, status):
                    return max(self.statuses.values())
        say(f"{signal.Signals(self.stop_signal).name}: the run ends.")
        return 128 + self.stop_signal

    def _server_ended(self, server: Placed, status: int | None) -> None:
        cause = "" if status is None else f" with status {status}"
        server.release()
        if server.num_starts > self.options.replacements:
            self.servers.remove(server)
            say(f"{server.name} has ended{cause} and is not placed again (--replacements).")
            return
        say(f"{server.name} has ended{cause}.")
        try:
            self._start_server(server)
        except (TimeoutError, RayError) as error:
            # The run continues with the remaining servers.
            self.servers.remove(server)
            say(f"{server.name} is not placed again: {error}")

    def _begin_again(self, trainer: Placed, status: int | None) -> bool:
        """Starts all training nodes again; returns False if the run has failed for good."""
        cause = "was lost" if status is None else f"ended with status {status}"
        say(f"{trainer.name} {cause}.")
        if status == _REFUSED or trainer.num_starts > self.options.replacements:
            return False
        self._stop(self.trainers)
        self._start_trainers()
        return True

    def _stop(self, placed: Sequence[Placed]) -> None:
        """Ends all commands at the same time and in order, and then the actors."""
        patience = self.options.stop_timeout
        stops = [p.actor.stop.remote(patience) for p in placed if p.actor is not None]
        ends = [p.result for p in placed if p.result is not None]
        for waited in (stops, ends):
            if waited:
                ray.wait(waited, num_returns=len(waited), timeout=patience + 10)
        for each in placed:
            each.result = None
            if each.actor is not None:
                each.release()


def say(text: str) -> None:
    """Prints a line for the user."""
    print(f"[ray] {text}", flush=True)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options and the trainer's arguments. A mistake ends the process with status 2."""
    words = list(arguments)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("config", help="TOML file of the run")
    add("--nnodes", type=int, default=1, help="number of machines that train")
    add("--nproc", type=int, default=1, help="number of ranks on each of these machines")
    add("--gpus-per-node", type=float, help="GPUs of each machine that trains (one for each rank)")
    add("--cpus-per-node", type=float, default=1.0, help="CPUs that Ray reserves on each of them")
    add("--servers", type=int, default=0, help="servers to place (0: those of the configuration)")
    add("--server-kind", default="vllm", choices=["vllm", "sglang", "embedded"])
    add("--server-model", help="directory that the servers load: model.hf_assets_path")
    add("--server-args", default="", help="further arguments of the servers, in one string")
    add("--gpus-per-server", type=float, default=1.0)
    add("--cpus-per-server", type=float, default=1.0)
    add("--registry", help="folder in which servers register, on a disk that all nodes share")
    add("--max-restarts", type=int, default=0, help="most restarts of ranks on living nodes")
    add("--replacements", type=int, default=3, help="most times that an actor is placed again")
    add(
        "--place-timeout",
        type=float,
        default=_NO_PLACE_SECONDS,
        help="maximum seconds until Ray has room",
    )
    add("--stop-timeout", type=float, default=60.0, help="seconds from SIGTERM to SIGKILL")
    add("--address", help="address of the Ray cluster (default: Ray's own choice)")
    given = parser.parse_args(words[:split])
    for name in ("nnodes", "nproc"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(given, name)}")
    if given.servers and given.server_model is None:
        parser.error("--server-model must name the model that the servers load")
    given.registry = str(Path(given.registry or "outputs/registry-ray").resolve())
    return given, words[split + 1 :]


def main() -> None:
    options, rest = parse(sys.argv[1:])
    for name in KEYS:  # servers on other hosts need them
        os.environ.setdefault(name, secrets.token_hex(16))
    launch = Launch(options, rest)

    def stop(signum: int, frame: FrameType | None) -> None:
        signum = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        launch.stop_signal = launch.stop_signal or signum

    ray.init(address=options.address, ignore_reinit_error=True)
    # Set after ray.init, which installs handlers of its own.
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # under nohup
    for signum in (signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,))):
        signal.signal(signum, stop)
    try:
        status = launch.run()
    except (TimeoutError, RayError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    ray.shutdown()
    sys.exit(status)


if __name__ == "__main__":
    main()
