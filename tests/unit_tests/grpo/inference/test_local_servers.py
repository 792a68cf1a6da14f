# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests the command lines of servers, and the handling of servers that do not start."""

import asyncio
import contextlib
import itertools
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from server_kinds import held_port

from torchtitan.grpo import config
from torchtitan.grpo.inference.kinds import KINDS, ServerSpec, make_client
from torchtitan.grpo.inference.local_servers import (
    HeldPorts,
    LaunchedServer,
    default_device,
    mask_keys,
    server_command,
    server_specs,
    set_random_keys,
    start_server,
)
from torchtitan.grpo.inference.server_log import first_causes, remedy
from torchtitan.grpo.inference.waiting import wait_until_up
from torchtitan.grpo.system.network import loopback_interface
from torchtitan.grpo.types import PromptProgress, ServerKind

SPEC = ServerSpec(
    "vllm", "/models/tiny", 4321, "cpu", "float32", max_model_len=256, max_running_requests=16,
    python="/env/bin/python", extra_args=("--seed", "7"),
)  # fmt: skip


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_each_kind_is_started_with_what_the_client_relies_on() -> None:
    command, environ = server_command(SPEC, {})
    assert command[:3] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert "--enable-scale-out" in command
    assert option(command, "--logprobs-mode") == "processed_logprobs"
    transfer = json.loads(option(command, "--weight-transfer-config"))
    assert transfer == {"backend": "torchtitan_grpo"}
    assert (option(command, "--dtype"), option(command, "--host")) == ("float32", "127.0.0.1")
    assert command[-2:] == ["--seed", "7"]
    assert environ["VLLM_SERVER_DEV_MODE"] == environ["HF_HUB_OFFLINE"] == "1"
    assert environ["OMP_NUM_THREADS"] == "1"

    sglang = replace(SPEC, kind="sglang")
    command, _ = server_command(sglang, {})
    assert (command[0], Path(command[1]).name) == ("/env/bin/python", "server_main.py")
    assert option(command, "--attention-backend") == "torch_native"
    assert "--sleep-on-idle" in command, "it leaves the cores to the trainer"
    assert option(command, "--max-total-tokens") == str(16 * 256)
    large = replace(sglang, max_running_requests=4096)
    assert option(server_command(large, {})[0], "--max-total-tokens") == "32768"
    command, environ = server_command(replace(sglang, device="cuda"), {})
    assert Path(command[1]).name == "server_main.py"
    assert not {"--attention-backend", "--max-total-tokens", "--sleep-on-idle"} & {*command}
    assert "OMP_NUM_THREADS" not in environ

    command, _ = server_command(replace(SPEC, kind="embedded", python=None), {})
    assert (command[0], Path(command[1]).name) == (sys.executable, "light_start.py")
    assert command[2] == "torchtitan.grpo.inference.embedded"
    assert option(command, "--max-running-requests") == "16"


@pytest.mark.parametrize(
    ("kind", "name", "chosen", "seed"),
    [
        ("embedded", "--max-batched-tokens", "0", "--seed"),
        ("vllm", "--max-num-batched-tokens", "256", "--seed"),
        ("sglang", "--chunked-prefill-size", "256", "--random-seed"),
    ],
)
def test_each_kind_is_given_its_budget_of_a_step_and_its_seed(kind, name, chosen, seed) -> None:
    spec = replace(SPEC, kind=kind, extra_args=())
    assert seed not in server_command(spec, {})[0]
    assert option(server_command(spec, {})[0], name) == chosen
    command, _ = server_command(replace(spec, max_batched_tokens=640, seed=5), {})
    assert (option(command, name), option(command, seed)) == ("640", "5")
    if kind == "embedded":
        return  # it chooses by itself
    crowded = replace(spec, max_running_requests=200)
    assert option(server_command(crowded, {})[0], name) == "448", "twice as many, in whole pages"
    assert option(server_command(replace(spec, device="cuda"), {})[0], name) == "2048"


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_the_loopback_interface_are_passed_by_environment(kind: ServerKind) -> None:
    spec = replace(SPEC, kind=kind, api_key="secret-a", admin_key="secret-b")
    ours = {"VLLM_API_KEY": "stale", "TORCHTITAN_GRPO_API_KEY": "stale"}
    command, environ = server_command(spec, ours)
    assert environ["TORCHTITAN_GRPO_API_KEY"] == "secret-a"
    assert environ["TORCHTITAN_GRPO_ADMIN_KEY"] == "secret-b"
    assert environ.get("VLLM_API_KEY") == ("secret-a" if kind == "vllm" else None)
    assert "secret" not in " ".join(command)
    assert environ["GLOO_SOCKET_IFNAME"] == loopback_interface()
    assert server_command(spec, {"GLOO_SOCKET_IFNAME": "eth0"})[1]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "GLOO_SOCKET_IFNAME" not in server_command(replace(spec, host="10.0.0.1"), {})[1]


def test_a_run_that_launches_servers_makes_keys_that_nobody_can_guess() -> None:
    environ: dict[str, str] = {}
    set_random_keys(config.Inference(), environ)
    assert environ == {}, "servers that are there have the keys that they have"
    set_random_keys(config.Inference(launch=True), environ)
    assert set(environ) == {"TORCHTITAN_GRPO_API_KEY", "TORCHTITAN_GRPO_ADMIN_KEY"}
    assert len(set(environ.values())) == 2 and min(map(len, environ.values())) >= 32
    other: dict[str, str] = {}
    set_random_keys(config.Inference(launch=True), other)
    assert not set(other.values()) & set(environ.values())
    of_user = {"TORCHTITAN_GRPO_API_KEY": "mine"}
    set_random_keys(config.Inference(launch=True, admin_key="mine-too"), of_user)
    assert of_user == {"TORCHTITAN_GRPO_API_KEY": "mine"}


def test_keys_are_masked_where_a_command_line_is_shown() -> None:
    command = ["serve", "--api-key", "secret", "--admin-api-key=secret", "--port", "1"]
    shown = ["serve", "--api-key", "***", "--admin-api-key=***", "--port", "1"]
    assert mask_keys(command) == shown


def test_the_environment_of_the_ranks_does_not_reach_a_server() -> None:
    ranks = ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTHONDONTWRITEBYTECODE")
    ours = {"OMP_NUM_THREADS": "4", "HOME": "/home/u"}  # the user's word counts
    _, environ = server_command(SPEC, dict.fromkeys(ranks, "1") | ours)
    assert not set(ranks) & set(environ) and ours.items() <= environ.items()


def test_specs_follow_the_configuration(tmp_path: Path) -> None:
    process = make_config(tmp_path, num_servers=2)
    process.rollout.max_concurrent_rollouts, process.inference.dtype = 31, "float32"
    environ = {"TORCHTITAN_GRPO_API_KEY": "k", "CUDA_VISIBLE_DEVICES": ""}
    assert default_device(environ) == "cpu"
    specs = server_specs(process, environ, [4321, 4322])
    assert [(spec.port, spec.seed) for spec in specs] == [(4321, 0), (4322, 1)]
    found = {(s.max_running_requests, s.max_model_len, s.device, s.dtype, s.api_key) for s in specs}
    assert found == {(16, 96, "cpu", "float32", "k")}
    process.inference.kind, process.inference.device = "vllm", "cuda"
    process.gpus, process.num_training_gpus = ["0"], 1
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8}')
    specs = server_specs(process, {}, [4321, 4322])
    assert [(spec.gpus, spec.gpu_memory_utilization) for spec in specs] == [(("0",), 0.2)] * 2
    process.gpus, process.num_training_gpus = [str(i) for i in range(8)], 4
    specs = server_specs(process, {}, [4321, 4322])
    assert [spec.gpus for spec in specs] == [("4", "5"), ("6", "7")]
    assert {(s.tensor_parallel_size, s.gpu_memory_utilization) for s in specs} == {(2, None)}


def test_each_row_of_the_cluster_has_its_servers_on_its_gpus(tmp_path: Path) -> None:
    process = make_config(tmp_path, num_servers=1)
    process.cluster = {
        "both": config.ClusterRow(["train", "rollout"], num_servers=2),
        "own": config.ClusterRow(["rollout"], num_servers=3),
    }
    specs = server_specs(process, {"CUDA_VISIBLE_DEVICES": ""}, [1, 2, 3, 4, 5])
    assert [spec.is_lent for spec in specs] == [True] * 2 + [False] * 3
    assert {(spec.gpus, spec.max_running_requests) for spec in specs} == {((), 52)}
    process.gpus, process.num_training_gpus = ["a", "b", "c", "d", "e", "f"], 4
    process.inference.device, process.lent_part = "cuda", 0.6
    specs = server_specs(process, {}, [1, 2, 3, 4, 5])
    found = [("a", 0.6), ("c", 0.6), ("e", 0.45), ("f", None), ("e", 0.45)]
    assert [(*spec.gpus, spec.gpu_memory_utilization) for spec in specs] == found
    process.cluster["both"].gpus, process.cluster["own"].gpus = [3], [5]
    specs = server_specs(process, {}, [1, 2, 3, 4, 5])
    found = [("d", 0.3)] * 2 + [("f", 0.3)] * 3
    assert [(*spec.gpus, round(spec.gpu_memory_utilization or 0, 9)) for spec in specs] == found


def make_config(folder: Path, num_servers: int) -> config.RolloutProcessConfig:
    return config.RolloutProcessConfig(
        grpo=config.GRPO(), prompts=config.Prompts(), rollout=config.Rollout(),
        inference=config.Inference(kind="embedded", launch=True, num_servers=num_servers),
        reward=config.Reward(), evaluation=config.Evaluation(), hf_assets_path=str(folder),
        vocab_size=10, eos_token_ids=[1], seq_len=96, seed=0, dump_folder=str(folder),
        start_version=0, progress=PromptProgress(), gpus=[],
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="ports are held on Linux alone")
def test_a_held_port_is_for_who_asks_for_it_by_number_again_and_again() -> None:
    with contextlib.closing(HeldPorts(2)) as held:
        assert len(set(held.ports)) == 2
        address = ("127.0.0.1", held.ports[0])
        for _ in range(2):
            # As asyncio and all kinds of servers make theirs; with a connection that it leaves.
            listener = socket.create_server(address)
            with socket.create_connection(address) as client:
                connection, _ = listener.accept()
                listener.close()
                connection.close()
                assert client.recv(1) == b""
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


def test_a_server_that_is_started_again_writes_into_the_same_log_which_others_cannot_read(
    tmp_path: Path,
) -> None:
    first = start_script(
        tmp_path, "test -e again || echo 'ValueError: of the first'; touch again; seq 3000; exit 3"
    )
    first.process.wait(60)
    first.stop()
    assert "ValueError: of the first" in first.describe_end()
    assert first.log_file.stat().st_mode & 0o777 == 0o600
    first.log_file.chmod(0o644)  # as a log that is appended to may have been left
    again = start_server(first.spec, first.log_file, keep_log=True)
    again.process.wait(60)
    again.stop()
    assert first.log_file.stat().st_mode & 0o777 == 0o600
    assert "ValueError" in first.log_file.read_text() and again.url == first.url
    assert "ended with exit status 3" in (end := again.describe_end())
    assert "ValueError" not in end and again.last_line() == "3000"


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"inference\.python.*install_vllm"):
        start_server(replace(SPEC, python="/nowhere/python"), tmp_path / "vllm-0.log")


def start_script(tmp_path: Path, script: str) -> LaunchedServer:
    """Starts a server whose interpreter is a shell script that ignores its arguments."""
    python = tmp_path / "python"
    tmp_path.mkdir(exist_ok=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    spec = replace(SPEC, python=str(python), port=held_port())
    return start_server(spec, tmp_path / "servers" / "vllm-0.log")


async def wait(*servers: LaunchedServer, timeout_seconds: float) -> None:
    clients = [make_client("vllm", s.url, control_timeout_seconds=3600) for s in servers]
    try:
        await wait_until_up(clients, servers, timeout_seconds)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


# The server's process ends while a worker of it keeps the connection of a request that it never answers.
LEAVES_A_WORKER = f"""exec {sys.executable} - "$@" <<'END'
import os, signal, socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
server = os.getpid()
if os.fork() == 0:
    connection, _ = listener.accept()
    connection.recv(1)
    print("RuntimeError: engine dead", flush=True)
    os.kill(server, signal.SIGUSR1)
time.sleep(3600)
END"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo out of memory; exit 3", r"ended with exit status 3\. .*vllm-0\.log.*out of memory"),
        ("exit 1", r"exit status 1\. It has written nothing into its log .*vllm-0\.log"),
        ("echo loading; kill -9 $$", r"exit status -9 \(SIGKILL, as the kernel .* memory.*loading"),
        ("kill -40 $$", r"exit status -40\."),
        (LEAVES_A_WORKER, r"exit status -10 \(SIGUSR1\)\. .*engine dead"),
    ],
)
async def test_a_server_that_ends_early_is_reported_at_once_with_its_own_reason(
    tmp_path: Path, script: str, said: str
) -> None:
    loading = start_script(tmp_path / "other", "echo loading; exec sleep 3600")
    server = start_script(tmp_path / "this", script)
    try:
        with pytest.raises(RuntimeError, match=f"(?s)A server must stay up.*{said}"):
            await wait(loading, server, timeout_seconds=3600)
    finally:
        loading.stop()
        server.stop()


async def test_a_server_that_does_not_come_up_is_given_up_and_can_be_stopped(tmp_path) -> None:
    server = start_script(tmp_path, "echo loading; exec sleep 600")
    try:
        said = (
            r"(?s)startup_timeout_seconds .*ClientConnector.*it still runs.*vllm-0\.log:\nloading"
        )
        with pytest.raises(TimeoutError, match=said) as caught:
            await wait(server, timeout_seconds=5)
        assert "inference.urls" not in str(caught.value)
    finally:
        server.stop()
    assert server.process.returncode is not None


async def test_servers_that_load_are_counted_and_one_is_described_by_its_log(tmp_path) -> None:
    server = start_script(tmp_path, "echo reading; echo loading shard 3; echo; exec sleep 600")
    told: list[tuple[str, int, int]] = []
    client, ready = make_client("vllm", server.url), make_client("vllm", "http://127.0.0.1:1")

    async def show(*wait: Any) -> None:
        told.append(wait)

    ready.health = AsyncMock()
    waiting = asyncio.create_task(
        wait_until_up([ready, client], [server], 300, show=show, kind="vllm")
    )
    try:
        async with asyncio.timeout(120):
            while not (told and told[-1][1] and told[-1][0].endswith("shard 3")):
                await asyncio.sleep(0.05)
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await client.close()
        await ready.close()
        server.stop()
    # Not the refused connection, which looks like a fault and is none.
    line = f"waiting for vllm servers: 1 of 2 ready; {server.url}: loading shard 3"
    assert told[-1] == (line, 1, 2)


@pytest.mark.parametrize(
    ("kind", "parallel", "memory"),
    [
        ("vllm", "--tensor-parallel-size", "--gpu-memory-utilization"),
        ("sglang", "--tp-size", "--mem-fraction-static"),
    ],
)
def test_a_server_is_told_its_gpus_and_its_part_of_their_memory(kind, parallel, memory) -> None:
    spec = replace(SPEC, kind=kind, device="cuda", gpus=("2", "3"), tensor_parallel_size=2)
    command, environ = server_command(replace(spec, gpu_memory_utilization=0.4), {})
    assert option(command, parallel) == "2"
    assert option(command, memory) == "0.4"
    assert environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert memory not in server_command(spec, {})[0], "it has them for itself"


@pytest.mark.parametrize(
    ("kind", "option"), [("vllm", "--enable-sleep-mode"), ("sglang", "--enable-memory-saver")]
)
def test_a_lent_server_is_told_that_it_sleeps_where_its_build_takes_that(kind, option) -> None:
    for device, is_lent in itertools.product(("cpu", "cuda"), (False, True)):
        command, _ = server_command(replace(SPEC, kind=kind, device=device, is_lent=is_lent), {})
        assert (option in command) == (device == "cuda" and is_lent)


def test_the_interpreter_is_found_from_another_folder_and_a_link_stays_a_link(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "env/python").symlink_to(sys.executable)
    process = make_config(tmp_path, num_servers=1)
    process.inference.python = "env/python"
    (spec,) = server_specs(process, {"CUDA_VISIBLE_DEVICES": ""}, [4321])
    assert spec.python == f"{tmp_path}/env/python"


def test_the_first_errors_of_a_log_are_shown_once(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    cause = "OSError: [Errno 28] No space left on device: '/dev/shm/1'"
    frames = "".join(f'  File "x.py", line {n}, in run\n' for n in range(500))
    log.write_text(f"loading\n{cause}\n{frames}RuntimeError: Engine core initialization failed.\n")
    spec = ServerSpec("vllm", "m", 1, "cpu", "float32", 64, 1)
    server = LaunchedServer(spec, SimpleNamespace(returncode=1), log)  # pyright: ignore
    message = server.describe_end()
    assert f"The first errors in its log:\n  {cause}\n" in message
    assert message.rstrip().endswith("RuntimeError: Engine core initialization failed.")
    log.write_text(f"{cause}\n")
    assert server.describe_end().count(cause) == 1
    cause = "RuntimeError: there is no room"
    log.write_text(
        "WARNING 11-25 00:58:01 [utils.py:8] This may cause errors like `OSError: [Errno 24]`.\n"
        f"(EngineCore pid=7) ERROR 11-25 00:59:03 [core.py:1510] {cause}\n(EngineCore pid=7) {cause}\n"
        + 5000 * "x\n"
    )  # fmt: skip
    assert first_causes(log) == f"The first errors in its log:\n  {cause}\n"


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=7) ERROR 11-25 00:59:03 [core.py:1510] RuntimeError: Insufficient space in "
        "/dev/shm for shared-memory allocation: 160 MiB required, 64 MiB free.",
        "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'",
        "Fatal Python error: Bus error",
        "RuntimeError: unable to mmap 1024 bytes from file </torch_1>: No space left on device (28)",
    ],
)
def test_a_server_without_shared_memory_is_told_what_to_give_it(tmp_path: Path, line: str) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"loading\n{line}\n")
    message = remedy(log)
    assert "more shared memory than /dev/shm has (" in message and "--shm-size" in message
    log.write_text("loading\nValueError: No available memory for the cache blocks.\n")
    assert remedy(log) == ""
