# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rendezvous of several nodes: who is first, where it listens, and what a replaced node finds.

The nodes are processes of this machine, with addresses of their own in 127.0.0.0/8.
"""

import multiprocessing
from multiprocessing.connection import Connection

import psutil
from torch.distributed.elastic.rendezvous import RendezvousParameters

from torchtitan.grpo.inference.local_servers import free_ports
from torchtitan.grpo.start.rendezvous import BACKEND, Node, NodeRendezvous

HOLDER, OTHER = "127.0.0.9", "127.0.0.2"  # torch would sort them the other way round
PATIENCE_SECONDS = 120.0


def be_node(pipe: Connection, address: str, port: int, num_ranks: int) -> None:
    """Joins a round whenever it is told to, and reports its place."""
    node = Node(address, (HOLDER, port), address == HOLDER, num_ranks, 60.0)
    told: list[str] = []
    parameters = RendezvousParameters(
        BACKEND, f"{HOLDER}:{port}", "run", 2, 2, address,
        last_call_timeout=1, keep_alive_interval=1,
    )  # fmt: skip
    rendezvous = NodeRendezvous(node, parameters, told.append)
    while pipe.recv() == "join":
        info = rendezvous.next_rendezvous()
        at = info.bootstrap_store_info
        listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
        place = (info.rank, info.world_size, at.master_addr, at.master_port)
        pipe.send((place, listening, told[-1], rendezvous.get_run_id()))
    rendezvous.shutdown()


class Member:
    def __init__(self, address: str, port: int, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=be_node, args=(theirs, address, port, num_ranks), daemon=True
        )
        self.process.start()

    def answer(self):
        assert self.pipe.poll(PATIENCE_SECONDS), "the node must find its place"
        return self.pipe.recv()


def test_the_holder_is_first_and_a_replaced_node_finds_the_new_store():
    port = free_ports(1)[0]
    holder, other = Member(HOLDER, port, 2), Member(OTHER, port, 1)
    members = [holder, other]
    try:
        for member in members:
            member.pipe.send("join")
        first, second = holder.answer(), other.answer()
        assert (first[0][:3], second[0][:3]) == ((0, 2, HOLDER), (1, 2, HOLDER))
        assert first[0][3] == second[0][3]
        assert first[1] == {HOLDER} and second[1] == set(), "no socket elsewhere"
        assert "2 nodes with 3 ranks, of which ranks 0 to 1 are here" in first[2]
        assert "of which rank 2 is here; rank 0 is at 127.0.0.9" in second[2]

        other.process.kill()
        other.process.join()
        members[1] = Member(OTHER, port, 1)
        for member in members:
            member.pipe.send("join")
        again, replaced = holder.answer(), members[1].answer()
        assert (again[0][0], replaced[0][0]) == (0, 1)
        # Keys of the first round's ranks are in the first round's store.
        assert again[0][3] == replaced[0][3] != first[0][3]
        assert {first[3], second[3], again[3], replaced[3]} == {first[3]}, "one launch, one id"
        for member in members:
            member.pipe.send("end")
            member.process.join(PATIENCE_SECONDS)
    finally:
        for member in members:
            member.process.kill()
