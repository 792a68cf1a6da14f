# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Torchrun's agent and its ranks listen on loopback alone on one host, and start again if that helps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from light import LIGHT
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


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    file = tmp_path / "rank.py"
    file.write_text(RANK)
    return file


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def assert_on_loopback(output: str) -> None:
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [report["world"] for report in found] == [2, 2]
    addresses = {address for report in found for address, _ in report["listening"]}
    assert addresses == {"127.0.0.1"}, "the ranks' store and gloo listen on loopback"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", BACKEND]


def test_torchrun_on_one_host_listens_on_loopback_alone(rank: Path):
    done = run([*TORCHRUN, "--nproc_per_node=2", str(rank)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert_on_loopback(done.stdout)


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
    return run([sys.executable, "-c", LIGHT + STAND_IN, *map(str, arguments)])


def test_the_train_command_listens_on_loopback_alone(rank: Path):
    done = train(2, rank)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_on_loopback(done.stdout)


@pytest.mark.parametrize(("status", "num_starts"), [(3, 1), (4, 1), (1, 3)])
def test_a_guard_or_a_missing_checkpoint_ends_a_run_that_may_be_restarted(
    tmp_path: Path, status: int, num_starts: int
):
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
        "from datetime import timedelta\n"
        "import torch.distributed as dist\n"
        "store = next(dist.rendezvous('env://'))[0]\n"
        "print('found' if store.check(['key']) else 'empty', flush=True)\n"
        "store.set('key', 'x')\n"
        "sys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 1)\n"
    )
    done = run([*TORCHRUN, "--max-restarts=1", "--nproc_per_node=1", str(file)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["empty", "empty"]


@pytest.mark.parametrize(("endpoint", "nodes"), [("", 2), ("127.0.0.1:29400", 1)])
def test_several_hosts_are_refused(endpoint: str, nodes: int):
    params = RendezvousParameters(BACKEND, endpoint, "run", min_nodes=1, max_nodes=nodes)
    with pytest.raises(ValueError, match=r"is for one host: --nnodes must be 1 .* got 1:"):
        LocalRendezvous.make(params)
