# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Torchrun's rendezvous listens on the address that it is given, and on one host on loopback alone."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from torchtitan.grpo.inference.local_servers import free_ports
from torchtitan.grpo.start.rendezvous import BACKEND, make_handler

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
print(json.dumps({"world": int(total), "listening": listening}), flush=True)
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


def test_two_agents_meet_at_the_address_that_is_named(rank: Path):
    """127.0.0.2 stands for the interface between the hosts; 127.0.0.3 is the second host's."""
    (port,) = free_ports(1)
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", BACKEND),
                *("--rdzv-endpoint", f"127.0.0.2:{port}", "--nnodes=2", "--local-addr", address),
                *("--nproc_per_node=1", str(rank)),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )
        for address in ("127.0.0.2", "127.0.0.3")
    ]  # fmt: skip
    try:
        outputs = [agent.communicate(timeout=120) for agent in agents]
    finally:
        for agent in agents:
            with contextlib.suppress(psutil.Error):
                agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], [error[-2000:] for _, error in outputs]
    found = [report for output, _ in outputs for report in reports(output)]
    assert [report["world"] for report in found] == [2, 2]
    sockets = [tuple(socket) for report in found for socket in report["listening"]]
    assert ("127.0.0.2", port) in sockets, "the agents' store"
    # The ranks' store is on the address of whichever host has rank 0; gloo is on loopback.
    assert {address for address, _ in sockets} <= {"127.0.0.1", "127.0.0.2", "127.0.0.3"}


def test_several_hosts_without_an_endpoint_are_refused():
    params = RendezvousParameters(BACKEND, "", "run", min_nodes=1, max_nodes=2)
    with pytest.raises(ValueError, match=r"--rdzv-endpoint must name the address .* got nothing"):
        make_handler(params)
