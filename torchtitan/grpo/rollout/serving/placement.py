# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Chooses the server that generates a completion.

A server with free room in its window comes first, because a completion that runs is better than
one that waits. Among the servers with room, the server with the least expected remaining work in
tokens is chosen. This need not be the server with the fewest completions, because some completions
are long; see StreamRL (2025, https://arxiv.org/abs/2504.15930). Only tokens that are still to be
generated count. Prompt tokens are left out, because they are computed once per group.
"""

from collections.abc import Iterable

from torchtitan.grpo.rollout.serving.server_state import Server


def best_server(
    servers: Iterable[Server],
    *,
    num_completions: int = 1,
    prefer: Server | None = None,
    has_begun: bool = False,
) -> Server | None:
    """Returns the server that gets the completions, or ``None`` if no server may take them.

    Args:
        servers: Servers that are READY and have a usable version.
        num_completions: Number of completions that are placed together. If no server has room for
            all of them, the server with the most room is chosen, so that as few as possible wait.
        prefer: A server that has computed the prefix. It is chosen if it has room.
        has_begun: Whether the completions, or their group, were started before. Such completions
            do not wait for room: if no window has room, the least busy server gets them.
    """
    candidates = list(servers)
    with_room = [server for server in candidates if server.free_places() > 0]
    if prefer in with_room:
        return prefer
    if not with_room and not has_begun:
        return None
    whole = [server for server in with_room if server.free_places() >= num_completions]
    if with_room and not whole:
        return max(with_room, key=lambda server: server.free_places())
    return min(whole or candidates, key=lambda s: (s.remaining_tokens(), s.load), default=None)


def holder_of(group_id: int, servers: Iterable[Server]) -> Server | None:
    """Returns a server that is generating another completion of the same group.

    That server has already computed the prompt.
    """
    for server in servers:
        if any(job.group_id == group_id for job in server.jobs):
            return server
    return None
