# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rendezvous of several nodes: who is first, where it listens, and what a replaced node finds.

The nodes are processes of this machine, with addresses of their own in 127.0.0.0/8.
"""

from multiprocessing.connection import Listener

from forked import ForkServer

from torchtitan.grpo.inference.local_servers import free_ports

HOLDER, OTHER = "127.0.0.9", "127.0.0.2"  # torch would sort them the other way round
PATIENCE_SECONDS = 120.0
# Joins a round whenever it is told to, and reports its place.
NODE = """
import sys
from multiprocessing.connection import Client
import psutil
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torchtitan.grpo.start.rendezvous import BACKEND, Node, NodeRendezvous

pipe, address, holder, port = Client(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
node = Node(address, (holder, port), address == holder, int(sys.argv[5]), 60.0)
told = []
parameters = RendezvousParameters(
    BACKEND, f"{holder}:{port}", "run", 2, 2, address, last_call_timeout=1, keep_alive_interval=1
)
rendezvous = NodeRendezvous(node, parameters, told.append)
while pipe.recv() == "join":
    info = rendezvous.next_rendezvous()
    at = info.bootstrap_store_info
    listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
    place = (info.rank, info.world_size, at.master_addr, at.master_port)
    pipe.send((place, listening, told[-1], rendezvous.get_run_id()))
rendezvous.shutdown()
"""


def test_the_holder_is_first_and_a_replaced_node_finds_the_new_store(
    fork_server: ForkServer, tmp_path
):
    (program := tmp_path / "node.py").write_text(NODE)
    port = str(free_ports(1)[0])

    def member(address: str, num_ranks: int):
        with Listener() as listener:
            where = [str(listener.address), address, HOLDER, port, str(num_ranks)]
            process = fork_server.start(program, where)
            return process, listener.accept()

    def join(*members):
        for _, pipe in members:
            pipe.send("join")
        for _, pipe in members:
            assert pipe.poll(PATIENCE_SECONDS), "the node must find its place"
        return [pipe.recv() for _, pipe in members]

    holder, other = member(HOLDER, 2), member(OTHER, 1)
    first, second = join(holder, other)
    assert (first[0][:3], second[0][:3]) == ((0, 2, HOLDER), (1, 2, HOLDER))
    assert first[0][3] == second[0][3]
    assert first[1] == {HOLDER} and second[1] == set(), "no socket elsewhere"
    assert "2 nodes with 3 ranks, of which ranks 0 to 1 are here" in first[2]
    assert "of which rank 2 is here; rank 0 is at 127.0.0.9" in second[2]

    other[0].kill()
    other[0].wait()
    other = member(OTHER, 1)
    again, replaced = join(holder, other)
    assert (again[0][0], replaced[0][0]) == (0, 1)
    # Keys of the first round's ranks are in the first round's store.
    assert again[0][3] == replaced[0][3] != first[0][3]
    assert {first[3], second[3], again[3], replaced[3]} == {first[3]}, "one launch, one id"
    for process, pipe in (holder, other):
        pipe.send("end")
        assert process.wait(PATIENCE_SECONDS) == 0
