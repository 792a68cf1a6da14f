# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Hosts on one machine, out of Linux namespaces: each with its own network, name, processes, /tmp and /dev/shm.

Two hosts are joined by a veth pair and nothing else, and each sees the one folder that they share as
/mnt. So nothing works between them because it happens to be one machine. A host's processes all
die with its first one, as if its power were cut.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SHARED = Path("/mnt")
"""Where each host sees the folder that the hosts share."""
_TOOLS = ("ip", "unshare", "nsenter", "mount", "ss")
_REPOSITORY = Path(__file__).resolve().parents[2]
# The first process of a host. It says when everything is mounted, and then only waits.
_BOOT = """
set -e
hostname "$1"
ip link set lo up
mount --make-rprivate /
mount --bind "$2" /mnt
mkdir -p /mnt/.repository
mount --bind "$3" /mnt/.repository
mount -t tmpfs tmpfs /tmp
mkdir -p "$3"  # the repository may lie in the folder that was just hidden
mount --bind /mnt/.repository "$3"
mount -t tmpfs tmpfs /dev/shm
echo booted
exec sleep infinity
"""


def why_not() -> str | None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (packages iproute2 and util-linux)"
    name = f"grpo-probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    try:
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
        trial = subprocess.run(
            ["ip", "netns", "exec", name, *unshare], capture_output=True, text=True
        )
        if trial.returncode:
            return f"namespaces of processes and mounts cannot be made here: {trial.stderr.strip()}"
    finally:
        _ip("netns", "delete", name)
    return None


class NetHost:
    def __init__(self, name: str, address: str, shared: Path) -> None:
        self.name, self.address = name, address
        self.interface = "wire0"
        self._shared = shared
        self._space = f"grpo-{os.getpid()}-{name}"
        self._init: subprocess.Popen[str] | None = None
        _ip("netns", "add", self._space)

    def connect(self, other: "NetHost") -> None:
        ends = [f"g{os.getpid()}{self.name[:4]}", f"g{os.getpid()}{other.name[:4]}"]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip((self, other), ends, strict=True):
            _ip("link", "set", end, "netns", host._space, "name", host.interface)
            _ip("-n", host._space, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host._space, "link", "set", host.interface, "up")

    def boot(self) -> None:
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
        boot = ["bash", "-c", _BOOT, "boot", self.name, str(self._shared), str(_REPOSITORY)]
        self._init = subprocess.Popen(
            ["ip", "netns", "exec", self._space, *unshare, *boot],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == "booted\n", f"{self.name} did not boot"

    def start(
        self, command: Sequence[str], log: Path, environ: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self._inside(), *command], stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env=dict(environ), start_new_session=True,
            )  # fmt: skip

    def listening(self) -> set[str]:
        shown = subprocess.run(
            [*self._inside(), "ss", "-ltnH"], capture_output=True, text=True, check=True
        )
        return {line.split()[3].rpartition(":")[0] for line in shown.stdout.splitlines()}

    def cut(self) -> None:
        _ip("-n", self._space, "link", "set", self.interface, "down")

    def mend(self) -> None:
        _ip("-n", self._space, "link", "set", self.interface, "up")

    def kill(self) -> None:
        if self._init is None:
            return
        os.kill(self._first_process(), signal.SIGKILL)
        self._init.wait(timeout=30)
        assert self._init.stdout is not None
        self._init.stdout.close()
        self._init = None

    def remove(self) -> None:
        self.kill()
        _ip("netns", "delete", self._space)

    def _first_process(self) -> int:
        assert self._init is not None, f"{self.name} must be booted first"
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text()
        return int(children.split()[0])

    def _inside(self) -> list[str]:
        target = str(self._first_process())
        return ["nsenter", "--target", target, "--net", "--mount", "--uts", "--pid", "--wd"]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
