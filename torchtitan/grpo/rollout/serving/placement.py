# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which server writes a completion.

The one with the least expected work left, in tokens, which is not the one with the fewest
completions where some are long: StreamRL (2025, https://arxiv.org/abs/2504.15930). Tokens
are those still to be written; a prompt's own are computed once for a group, and left out.
Room comes first: little work that waits is no better than much that runs.
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
    """The server to give completions to, among those that may have them; None where none may.

    Args:
        servers: READY, and of versions that will do.
        num_completions: That come together. Where they fit nowhere whole, the server with the
            most free places gets them: elsewhere more would wait while places are empty here.
        prefer: Chosen where it has room: it has computed the prefix.
        has_begun: They were begun before, or their group was. They do not wait for room behind
            new work: where no window has any, the least busy server is given them.
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
    """A server that is writing another completion of the same group, and has the prompt."""
    for server in servers:
        if any(job.group_id == group_id for job in server.jobs):
            return server
    return None
