# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Network interfaces of this host, and which of them leads to another host."""

import socket

import psutil

from torchtitan.grpo.system.loopback import is_loopback
from torchtitan.grpo.system.routes import source_address

# Addresses for documentation (RFC 5737), which no host has: the way to them is the default route.
_SOMEWHERE = "192.0.2.1"


def default_address() -> str:
    """Returns this host's address on the default route.

    Raises:
        OSError: If there is no default route.
    """
    return source_address(_SOMEWHERE, 9)


def interface_of(address: str) -> str | None:
    """Returns the interface that has an address, or ``None`` if none of this host has it.

    All of 127.0.0.0/8 belongs to the loopback interface, whichever of its addresses is listed.
    """
    is_local = is_loopback(address) and address != "::1"
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own = entry.address.partition("%")[0]
            if own == address or (is_local and own.startswith("127.")):
                return name
    return None


def address_of(interface: str) -> str:
    """Returns the address of an interface, IPv4 before IPv6.

    Raises:
        ValueError: If there is no such interface, or it has no address. The message lists those
            that have one.
    """
    usable: dict[str, str] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, entries in psutil.net_if_addrs().items():
            own = [e.address.partition("%")[0] for e in entries if e.family == family]
            if own:
                usable.setdefault(name, own[0])
    if interface not in usable:
        listed = ", ".join(f"{name} ({address})" for name, address in sorted(usable.items()))
        raise ValueError(
            f"The interface must be one of this host that has an address, got {interface!r}. There "
            f"is {listed}."
        )
    return usable[interface]
