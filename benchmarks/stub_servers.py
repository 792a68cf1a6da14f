# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts `stub_server.py`: embedded servers that stand for servers on other hardware."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from disturbed_servers import STARTUP_SECONDS, wait_for_server

from torchtitan.grpo.inference.kinds import ServerSpec
from torchtitan.grpo.inference.local_servers import HeldPorts, LaunchedServer
from torchtitan.grpo.system.child import start_child, stop_children


@contextmanager
def running_stubs(
    count: int,
    model: Path,
    folder: Path,
    *,
    decode_seconds: float,
    mean_tokens: float,
    max_model_len: int,
    max_running_requests: int,
    attend: Callable[[int], object] = lambda pid: None,
) -> Iterator[list[LaunchedServer]]:
    """Yields stub servers that are up, and ends them.

    Args:
        count: Number of servers.
        model: Hugging Face directory of the model whose parameters are updated.
        folder: Folder for the servers' logs.
        decode_seconds: Duration of each decode step.
        mean_tokens: Mean length of completions that end by themselves.
        max_model_len: Maximum length of a sequence.
        max_running_requests: Maximum number of completions that a server generates at once.
        attend: Called with the id of each process when it has started, and again when it is up.
    """
    servers: list[LaunchedServer] = []
    held = HeldPorts(count)
    try:
        for port in held.ports:
            spec = ServerSpec(
                "embedded", str(model), port, "cpu", "float32", max_model_len, max_running_requests
            )
            command = [
                *(sys.executable, str(Path(__file__).with_name("stub_server.py"))),
                *("--decode-seconds", str(decode_seconds), "--mean-tokens", str(mean_tokens)),
                *("--model-path", str(model), "--port", str(port), "--seed", str(port)),
                *("--max-model-len", str(max_model_len)),
                *("--max-running-requests", str(max_running_requests)),
                # Nothing is computed, so one step may take all prompts.
                *("--max-prefill-tokens", str(max_running_requests * max_model_len)),
            ]
            log_file = folder / f"server-{port}.log"
            environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            process = start_child(command, env=environment, log_file=log_file)
            servers.append(LaunchedServer(spec, process, log_file))
            attend(process.pid)
        for server in servers:
            wait_for_server(server, STARTUP_SECONDS)
            attend(server.process.pid)
        yield servers
    finally:
        stop_children([server.process for server in servers])
        held.close()
