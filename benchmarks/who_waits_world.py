# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the trainer and servers for `who_waits.py`, disturbs them, and reads what the run has left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disturbed_servers import wait_for_server
from ranks import fork_server

from torchtitan.grpo.inference.kinds import ServerSpec, make_client
from torchtitan.grpo.inference.local_servers import HeldPorts, LaunchedServer

REPOSITORY = Path(__file__).resolve().parents[1]
TASK = REPOSITORY / "assets/reverse_digits"
CODE = REPOSITORY / "benchmarks/who_waits_code.py"
RUN_SECONDS = 240.0
_STARTUP_SECONDS = 120.0

BASE: Mapping[str, Any] = {
    "model.hf_assets_path": TASK / "model",
    "training.seq_len": 256,
    "training.local_batch_size": 32,
    "training.mixed_precision_param": "float32",
    "training.steps": 16,
    "optimizer.implementation": "foreach",
    "optimizer.lr": 1e-6,
    "lr_scheduler.warmup_steps": 0,
    "activation_checkpoint.mode": "none",
    "debug.seed": 0,
    "grpo.group_size": 4,
    "grpo.prompts_per_step": 8,
    "grpo.policy_loss": f"{REPOSITORY / 'benchmarks/timed_loss.py'}:paced",
    "grpo.policy_loss_options.seconds": 0.2,
    "prompts.path": TASK / "train.jsonl",
    "prompts.max_prompt_tokens": 16,
    "rollout.max_head_offpolicyness": 1,
    "rollout.max_new_tokens": 60,
    "rollout.max_concurrent_rollouts": 64,
    "inference.kind": "embedded",
    "inference.dtype": "float32",
    "reward.functions": "partial_match",
    "observe.progress": "none",
    "observe.log_level": "warning",
}


@dataclass(frozen=True)
class Stub:
    """A server that sleeps (`stub_server.py`); ``long_slots`` completions at a time reach the limit."""

    decode_seconds: float = 0.015
    mean_tokens: float = 16.0
    long_slots: int = 0


@dataclass
class World:
    """What a disturbance may look at and change during a run."""

    folder: Path
    servers: list[LaunchedServer]
    ended: threading.Event = field(default_factory=threading.Event)

    def wait_for_step(self, step: int) -> bool:
        """Returns True once the step is recorded, and False if the run ends before."""
        while not self.ended.wait(0.02):
            if len(records_of(self.folder)) >= step:
                return True
        return False

    def wait_for_requests(self, index: int) -> bool:
        """Returns True once the server generates several completions, and False if the run ends before."""
        while not self.ended.wait(0.02):
            if asyncio.run(_num_running(self.servers[index])) > 2:
                return True
        return False

    def start_again(self, index: int) -> None:
        self.servers[index] = start_embedded(
            self.servers[index].spec, self.folder.parent / f"server-{index}-again.log"
        )


@dataclass(frozen=True)
class Case:
    """A run. Without ``stubs`` and ``num_servers`` it launches embedded servers itself.

    Attributes:
        settings: Settings that differ from `BASE`.
        num_ranks: Number of training ranks.
        stubs: Stub servers that run beside the run.
        num_servers: Number of embedded servers that run beside the run.
        slow: What is slow on the ranks (`who_waits_run.py`).
        disturb: Called in a thread while the run goes on.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    stubs: Sequence[Stub] = ()
    num_servers: int = 0
    slow: Mapping[str, Any] = field(default_factory=dict)
    disturb: Callable[[World], None] | None = None


@dataclass(frozen=True)
class Finished:
    """What a run has left; ``seconds`` by the benchmark's own stamps."""

    records: list[dict[str, Any]]
    summary: dict[str, Any]
    seconds: float

    def share(self, cause: str) -> float:
        return next((c["fraction"] for c in self.summary["causes"] if c["cause"] == cause), 0.0)


def records_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def run_case(case: Case, folder: Path) -> Finished:
    folder.mkdir(parents=True)
    dump, stamps = folder / "run", folder / "stamps.json"
    with ExitStack() as stack:
        servers = stack.enter_context(_servers(case, folder))
        settings: dict[str, Any] = {"job.dump_folder": dump, **BASE}
        if servers:
            settings["inference.urls"] = ",".join(server.url for server in servers)
        elif "sft.path" not in case.settings:
            settings |= {"inference.launch": "true", "inference.python": fork_server().launcher()}
        settings |= case.settings
        world = World(dump, servers)
        job = {"stamps": str(stamps), **case.slow}
        _run_ranks(case, world, [f"--{key}={value}" for key, value in settings.items()], job)
    begin_end = json.loads(stamps.read_text())
    summary = json.loads((dump / "summary.json").read_text())
    return Finished(records_of(dump), summary, begin_end["end"] - begin_end["begin"])


def _run_ranks(case: Case, world: World, words: list[str], job: dict[str, Any]) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        "WHO_WAITS": json.dumps(job),
    }  # fmt: skip
    console = world.folder.parent / "console.log"
    with console.open("wb") as output:
        process = fork_server().start(
            Path(__file__).with_name("who_waits_run.py"), words, num_ranks=case.num_ranks,
            environment=environment, folder=REPOSITORY, output=output,
        )  # fmt: skip
        disturbing = threading.Thread(target=case.disturb or (lambda _: None), args=(world,))
        disturbing.start()
        try:
            process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        finally:
            world.ended.set()
            disturbing.join()
    if process.returncode != 0:
        sys.exit(f"The run failed:\n{console.read_text(errors='replace')[-6000:]}")


@contextmanager
def _servers(case: Case, folder: Path) -> Iterator[list[LaunchedServer]]:
    count = len(case.stubs) or case.num_servers
    held, servers = HeldPorts(count), list[LaunchedServer]()
    model = str(TASK / "model")
    try:
        for index, port in enumerate(held.ports):
            spec = ServerSpec("embedded", model, port, "cpu", "float32", 256, 64)
            log = folder / f"server-{index}.log"
            stub = case.stubs[index] if case.stubs else None
            servers.append(start_stub(spec, stub, log) if stub else start_embedded(spec, log))
        for server in servers:
            wait_for_server(server, _STARTUP_SECONDS)
        yield servers
    finally:
        for server in servers:
            for signum in (signal.SIGCONT, signal.SIGKILL):
                server.process.send_signal(signum)
        held.close()


def start_embedded(spec: ServerSpec, log: Path) -> LaunchedServer:
    return fork_server().start_server(spec, log)


def start_stub(spec: ServerSpec, stub: Stub, log: Path) -> LaunchedServer:
    options = {
        "--decode-seconds": stub.decode_seconds, "--mean-tokens": stub.mean_tokens,
        "--long-slots": stub.long_slots, "--model-path": spec.model_path, "--port": spec.port,
        "--seed": spec.port, "--max-model-len": spec.max_model_len,
        "--max-running-requests": spec.max_running_requests,
        "--max-prefill-tokens": spec.max_running_requests * spec.max_model_len,
    }  # fmt: skip
    with log.open("ab") as output:
        process: Any = fork_server().start(
            Path(__file__).with_name("stub_server.py"),
            [str(word) for pair in options.items() for word in pair],
            environment=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            folder=REPOSITORY,
            output=output,
        )
    return LaunchedServer(spec, process, log)


async def _num_running(server: LaunchedServer) -> int:
    client = make_client(server.kind, server.url, control_timeout_seconds=5.0)
    try:
        return (await client.load()).running
    finally:
        await client.close()


def pause(world: World, index: int, seconds: float) -> None:
    """Stops a server for some seconds."""
    world.servers[index].process.send_signal(signal.SIGSTOP)
    world.ended.wait(seconds)
    world.servers[index].process.send_signal(signal.SIGCONT)


def kill(world: World, index: int) -> None:
    world.servers[index].process.kill()
    world.servers[index].process.wait(10)
    time.sleep(0.1)
