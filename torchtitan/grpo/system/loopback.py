# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tells addresses of this machine alone from those that others reach."""

import ipaddress
import sys


def is_loopback(host: str | None) -> bool:
    """Returns whether an address, or a name, is reached from this machine alone.

    ``None``, the address of a Unix socket, is.
    """
    if host is None or host.lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return found.is_loopback or (mapped is not None and mapped.is_loopback)


def loopback_interface() -> str:
    """Returns the name of the loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"
