# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A run on two hosts, of which one loses its link and then dies.

The hosts are namespaces of this machine (`programs/net_hosts.py`). Where those may not be made, the
test is skipped with the reason.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from net_hosts import SHARED, NetHost, why_not

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 600.0
NUM_STEPS = 18
ENDPOINT, REGISTRY = "10.77.0.1:29400", "10.77.0.1:29500"
RUN = (
    f"--job.dump_folder={SHARED}/run", "--training.steps", str(NUM_STEPS), "--grpo.prompts_per_step=6",
    "--evaluation.num_prompts=8", "--checkpoint.enable", "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=3", "--inference.no-launch", "--inference.dtype=auto",
    "--inference.registry_address", REGISTRY, "--weight_sync.timeout_seconds=6",
    "--rollout.request_timeout_seconds=20", "--observe.log_level=info",
    # A cut link is found by a push or by a check of an idle server, whichever waits. All of it must
    # end long before the silence of the rank behind the link counts as its death.
    "--inference.control_timeout_seconds=6", "--grpo.lost_rank_seconds=500",
    "--comm.train_timeout_seconds=500",
)  # fmt: skip
KEYS = {"TORCHTITAN_GRPO_API_KEY": "generation-key", "TORCHTITAN_GRPO_ADMIN_KEY": "control-key"}


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first = NetHost("alpha", "10.77.0.1", folder)
        self.second = NetHost("beta", "10.77.0.2", folder)
        self.first.connect(self.second)
        self.programs: list[subprocess.Popen[bytes]] = []

    def train(self, host: NetHost, num_ranks: int) -> subprocess.Popen[bytes]:
        script = ["bash", str(REPOSITORY / "scripts/launch_multinode.sh")]
        options = ["--nnodes", "2", "--rdzv-endpoint", ENDPOINT, "--max-restarts", "3"]
        config = str(REPOSITORY / "train_configs/quickstart.toml")
        command = [*script, config, *options, "--nproc", str(num_ranks), "--", *RUN]
        return self._start(host, command, "train")

    def serve(self, host: NetHost) -> subprocess.Popen[bytes]:
        python = str(REPOSITORY / ".venv/bin/python")
        light = str(REPOSITORY / "torchtitan/grpo/system/light_start.py")
        model = str(REPOSITORY / "assets/reverse_digits/model")
        command = [python, light, "torchtitan.grpo.inference.serve", "embedded", model]
        command += ["--register", f"http://{REGISTRY}", "--max-model-len", "256"]
        return self._start(host, command, "server")

    def _start(self, host: NetHost, command: list[str], name: str) -> subprocess.Popen[bytes]:
        environ = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")}
        environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        log = self.folder / f"{host.name}-{name}.log"
        program = host.start(command, log, environ | KEYS)
        self.programs.append(program)
        return program

    def log(self, host: NetHost, name: str = "train") -> str:
        file = self.folder / f"{host.name}-{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def steps(self) -> list[int]:
        file = self.folder / "run/metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            ended = [p.args for p in self.programs if p.poll() not in (None, 0)]
            assert not ended and time.monotonic() < deadline, f"{what}: {ended}\n{self.report()}"
            time.sleep(0.1)

    def report(self) -> str:
        files = sorted(self.folder.glob("*.log")) + [self.folder / "run/rollout_process.log"]
        texts = [
            f"--- {f.name}\n{f.read_text(errors='replace')[-5000:]}" for f in files if f.exists()
        ]
        return "\n".join(texts)

    def close(self) -> None:
        for host in (self.first, self.second):
            host.remove()
        for program in self.programs:
            program.wait(timeout=30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.close()


def served(cluster: Cluster) -> int:
    found = re.findall(r"tensors as version (\d+)", cluster.log(cluster.second, "server"))
    return int(found[-1]) if found else -1


def registered(cluster: Cluster) -> str:
    (file,) = (cluster.folder / "run/registry").glob("*.json")
    return json.loads(file.read_text())["url"]


def beats(cluster: Cluster) -> int:
    files = list((cluster.folder / "run/registry").glob("*.json"))
    return json.loads(files[0].read_text())["beat"] if files else 0


def wait_for_silence(cluster: Cluster, seconds: float) -> None:
    last, since = beats(cluster), time.monotonic()

    def is_silent() -> bool:
        nonlocal last, since
        if beats(cluster) != last:
            last, since = beats(cluster), time.monotonic()
        return time.monotonic() - since >= seconds

    cluster.wait("the silence of the second host", is_silent)


@pytest.mark.slow
def test_a_run_on_two_hosts_outlives_a_cut_link_and_a_dead_host(cluster: Cluster) -> None:
    first, second = cluster.first, cluster.second
    for host in (first, second):
        host.boot()
    cluster.serve(second)
    trainers = [cluster.train(second, 1), cluster.train(first, 2)]

    cluster.wait("three steps", lambda: len(cluster.steps) >= 3)
    told = cluster.log(first)
    assert "round 1: 2 nodes with 3 ranks, of which ranks 0 to 1 are here" in told
    assert "rank 0 is at 10.77.0.1" in told
    assert "of which rank 2 is here" in cluster.log(second)
    assert f"interface wire0, address {second.address}" in cluster.log(second)
    # Every socket is on the link or on loopback.
    for host in (first, second):
        assert host.listening() <= {host.address, "127.0.0.1"}, host.listening()

    # Directly after a push: a cut amid the next gather would stop the ranks before the lane asks its
    # server for anything, and the lane would rightly not be lost.
    version = served(cluster)
    cluster.wait("the next push", lambda: served(cluster) > version)
    second.cut()
    wait_for_silence(cluster, seconds=8)  # longer than four beats, and than a bucket may take
    url = re.escape(registered(cluster))
    lost = re.compile(rf"Lost {url} while \w+: ")
    cluster.wait("the lost lane", lambda: bool(lost.search(cluster.log(first))))
    steps, version = len(cluster.steps), served(cluster)
    second.mend()
    cluster.wait("steps after the cut", lambda: len(cluster.steps) >= min(steps + 2, NUM_STEPS - 2))
    cluster.wait("weights after the cut", lambda: served(cluster) > version)
    # The server says it when it has the weights, the lane when it has asked for their checksums.
    joined_again = re.compile(rf"{url} has joined again, \d+ s after it")
    cluster.wait("the lane's return", lambda: bool(joined_again.search(cluster.log(first))))
    assert "round 2" not in cluster.log(first), "the ranks outlive the cut"

    second.kill()
    cluster.programs.clear()
    cluster.programs.append(trainers[1])
    cluster.wait("the first host's wait", lambda: "all nodes are there again" in cluster.log(first))
    done = len(cluster.steps)
    assert 3 <= done < NUM_STEPS, cluster.report()
    second.boot()
    cluster.serve(second)
    again = cluster.train(second, 1)
    cluster.wait("the end", lambda: None not in (again.poll(), trainers[1].poll()))

    assert (again.wait(), trainers[1].wait()) == (0, 0), cluster.report()
    told = cluster.log(first)
    assert "round 2: 2 nodes with 3 ranks" in told
    assert "Resumes after step" in told, cluster.report()
    assert cluster.steps == list(range(1, NUM_STEPS + 1))
    summary = json.loads((cluster.folder / "run/summary.json").read_text())
    assert summary["server_version"] == NUM_STEPS, summary  # the weights crossed
    assert Path("/mnt") == SHARED
