# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Torchrun's agent and its ranks listen on loopback alone where all are on one host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
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
TRAIN = "from torchtitan.grpo.start.torchrun import run_ranks; import sys; sys.exit(run_ranks(sys.argv[1:], 2, 5.0))"


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    file = tmp_path / "rank.py"
    file.write_text(RANK)
    return file


def reports(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def environment() -> dict[str, str]:
    return os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def test_torchrun_on_one_host_listens_on_loopback_alone(rank: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", BACKEND]
    command += ["--nproc_per_node=2", str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    found = reports(done.stdout)
    assert [report["world"] for report in found] == [2, 2]
    addresses = {address for report in found for address, _ in report["listening"]}
    assert addresses == {"127.0.0.1"}, "the ranks' store and gloo listen on loopback"


def test_the_train_command_listens_on_loopback_alone(rank: Path, tmp_path: Path):
    """Its agent runs the module of the training ranks, which stands here for the file above."""
    package = tmp_path / "stand_in.py"
    package.write_text(
        "from torch.distributed.launcher import api\n"
        "real = api.launch_agent\n"
        f"api.launch_agent = lambda config, entry, args, **kw: real(config, entry, [{str(rank)!r}], **kw)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import stand_in; {TRAIN}"],
        capture_output=True, text=True, timeout=120, env=environment(), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = reports(done.stdout)
    assert [report["world"] for report in found] == [2, 2]
    assert {address for report in found for address, _ in report["listening"]} == {"127.0.0.1"}


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
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", BACKEND]
    command += ["--max-restarts=1", "--nproc_per_node=1", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["empty", "empty"]


@pytest.mark.parametrize(("endpoint", "nodes"), [("", 2), ("127.0.0.1:29400", 1)])
def test_several_hosts_are_refused(endpoint: str, nodes: int):
    params = RendezvousParameters(BACKEND, endpoint, "run", min_nodes=1, max_nodes=nodes)
    with pytest.raises(ValueError, match=r"is for one host: --nnodes must be 1 .* got 1:"):
        LocalRendezvous.make(params)
