# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The rendezvous of one host, on loopback alone, and that of several nodes."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Listener
from pathlib import Path

import pytest
from light import LIGHT
from server_kinds import held_port
from torch.distributed.elastic.rendezvous import RendezvousParameters

from torchtitan.grpo.start.local_rendezvous import BACKEND, LocalRendezvous

# Joins the process group, and prints the sockets of the agent and of this rank that listen.
RANK = """
import json, os, psutil
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
listening = [
    [c.laddr.ip, c.laddr.port]
    for process in (psutil.Process(), psutil.Process().parent())
    for c in process.net_connections("tcp")
    if c.status == psutil.CONN_LISTEN
]
# In one piece, so that the lines of two ranks do not mix.
print(json.dumps({"world": int(total), "listening": listening}) + "\\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


STAND_IN = """
import sys
from torch.distributed.launcher import api
from torchtitan.grpo.start.torchrun import run_ranks

real = api.launch_agent
api.launch_agent = lambda config, entry, args, **kw: real(config, entry, sys.argv[2:], **kw)
sys.exit(run_ranks([], int(sys.argv[1]), 5.0, max_restarts=2))
"""


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the agent of the train command, whose ranks are another program."""
    command = [sys.executable, "-c", LIGHT + STAND_IN, *map(str, arguments)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_the_train_command_listens_on_loopback_alone(tmp_path: Path):
    (rank := tmp_path / "rank.py").write_text(RANK)
    done = train(2, rank)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["world"] for report in found] == [2, 2]
    addresses = {address for report in found for address, _ in report["listening"]}
    assert addresses == {"127.0.0.1"}, "the ranks' store and gloo listen on loopback"


@pytest.mark.parametrize(("status", "num_starts"), [(3, 1), (4, 1), (1, 3)])
def test_a_guard_or_a_missing_checkpoint_ends_a_run_for_good(tmp_path, status, num_starts):
    program, starts = tmp_path / "rank.py", tmp_path / "starts"
    program.write_text("import sys; open(sys.argv[1], 'a').write('.'); sys.exit(int(sys.argv[2]))")
    done = train(1, program, starts, status)
    assert done.returncode == status, done.stderr[-3000:]
    assert len(starts.read_text()) == num_starts


def test_restarted_ranks_find_a_new_store(tmp_path: Path):
    """Both attempts put the same key; the second would find the first one's."""
    file = tmp_path / "rank.py"
    file.write_text(
        "import os, sys\n"
        "import torch.distributed as dist\n"
        "store = next(dist.rendezvous('env://'))[0]\n"
        "print('found' if store.check(['key']) else 'empty', flush=True)\n"
        "store.set('key', 'x')\n"
        "sys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 1)\n"
    )
    done = train(1, file)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["empty", "empty"]


# With `inference.urls_file`, a hangup to rank 0 itself does not stop it.
STOPPING = """
import sys
from torchtitan.grpo.system.stop import StopRequest
stop = StopRequest(60)
if sys.argv[1] == "urls_file":
    stop.on_hangup(lambda: None)
print("ready", flush=True)
stop.wait(60)
print(stop.signum, flush=True)
sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize(
    ("launcher", "meaning", "is_ignored"),
    [
        ("train", "stop", False),
        ("train", "urls_file", False),
        ("torchrun", "urls_file", False),
        ("train", "stop", True),
        ("torchrun", "urls_file", True),
    ],
)
def test_a_lost_terminal_stops_ranks_in_order_unless_hangups_are_ignored(
    tmp_path, launcher, meaning, is_ignored
):
    (rank := tmp_path / "rank.py").write_text(LIGHT + STOPPING)
    command = [sys.executable, "-c", LIGHT + STAND_IN, "1", str(rank), meaning]
    if launcher == "torchrun":
        agent = "import torch.distributed.run as r; r.main(__import__('sys').argv[1:])"
        command = [sys.executable, "-c", agent, f"--rdzv-backend={BACKEND}", str(rank), meaning]
    action = "--ignore-signal=HUP" if is_ignored else "--default-signal=HUP"
    process = subprocess.Popen(
        ["env", action, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGHUP)
    if is_ignored:
        os.killpg(process.pid, signal.SIGINT)
    stopped_by = signal.SIGINT if is_ignored else signal.SIGTERM
    assert process.stdout.readline() == f"{stopped_by}\n"
    process.communicate(timeout=60)
    assert launcher == "torchrun" or process.returncode == 128 + stopped_by


@pytest.mark.parametrize(("endpoint", "nodes"), [("", 2), ("127.0.0.1:29400", 1)])
def test_several_hosts_are_refused(endpoint: str, nodes: int):
    params = RendezvousParameters(BACKEND, endpoint, "run", min_nodes=1, max_nodes=nodes)
    with pytest.raises(ValueError, match=r"is for one host: --nnodes must be 1 .* got 1:"):
        LocalRendezvous.make(params)


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


def test_the_holder_is_first_and_a_replaced_node_finds_the_new_store(fork_server, tmp_path):
    (program := tmp_path / "node.py").write_text(NODE)
    port = str(held_port())

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
