# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Identity, addresses and interfaces of this host, and which of them lead to another host."""

import contextlib
import ipaddress
import socket
import sys
from pathlib import Path

import psutil

# An address for documentation (RFC 5737), which no host has: the way to it is the default route.
_SOMEWHERE = "192.0.2.1"


def boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def is_loopback(host: str | None) -> bool:
    """Returns whether a host, or ``None`` for a Unix socket, can be reached only from here."""
    if host is None or host.lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return found.is_loopback or (mapped is not None and mapped.is_loopback)


def loopback_interface() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def source_address(host: str, port: int) -> str:
    """Returns this host's address on the route to another host, or to one of its own addresses."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing; the kernel only looks up the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def default_address() -> str:
    """Returns this host's address on the default route. Raises OSError if there is no such route."""
    return source_address(_SOMEWHERE, 9)


def interface_of(address: str) -> str | None:
    """Returns this host's interface with an address, or None. All of 127.0.0.0/8 is loopback's."""
    is_local = is_loopback(address) and address != "::1"
    for name, addresses in _addresses(socket.AF_INET, socket.AF_INET6).items():
        if any(own == address or (is_local and own.startswith("127.")) for own in addresses):
            return name
    return None


def address_of(interface: str) -> str:
    """Returns an interface's address, preferably IPv4. Raises ValueError, which lists usable interfaces."""
    usable = _addresses(socket.AF_INET6) | _addresses(socket.AF_INET)
    if interface not in usable:
        listed = ", ".join(f"{name} ({own[0]})" for name, own in sorted(usable.items()))
        raise ValueError(
            "The interface must be a network interface of this host with an address, got "
            f"{interface!r}. This host has {listed}."
        )
    return usable[interface][0]


def _addresses(*families: socket.AddressFamily) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in families:
                found.setdefault(name, []).append(entry.address.partition("%")[0])
    return found
