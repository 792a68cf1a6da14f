# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which address of this host leads to another one. Trainer and servers ask, so it needs no torch."""

import socket


def source_address(host: str, port: int) -> str:
    """Returns this host's address on the route to another host.

    For an address of this host itself, it is the same address.

    Raises:
        OSError: If the name is unknown, or no route leads there.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing; the kernel only looks up the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]
