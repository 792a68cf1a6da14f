# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts the embedded inference server.

    python -m torchtitan.grpo.inference.embedded --model-path DIR --port 30000

A run starts it through ``torchtitan/grpo/system/light_start.py``, which does not import all of
torchtitan first.
"""

import argparse
import asyncio
import logging
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

import transformers

from torchtitan.grpo.inference.access import keys_of_environment, require_keys
from torchtitan.grpo.inference.embedded.bodies import ModelFacts
from torchtitan.grpo.inference.embedded.decode_graph import CudaCapture
from torchtitan.grpo.inference.embedded.engine import Engine
from torchtitan.grpo.inference.embedded.model import (
    ModelRunner,
    load_model,
    read_eos_ids,
    read_known_ids,
)
from torchtitan.grpo.inference.embedded.server import EmbeddedServer
from torchtitan.grpo.inference.embedded.updates import WeightUpdater
from torchtitan.grpo.inference.embedded.weights import WeightTable
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.connections import (
    HEADER_SECONDS,
    MAX_CONNECTIONS,
    raise_descriptor_limit,
)
from torchtitan.grpo.system.files import write_whole
from torchtitan.grpo.system.http_site import HttpSite
from torchtitan.grpo.system.network import is_loopback, loopback_interface
from torchtitan.grpo.system.stop import stop_signals
from torchtitan.grpo.weight_wire.process_group import own_group_facts

logger = logging.getLogger("torchtitan.grpo.inference.embedded")

_DEFAULT_MAX_MODEL_LEN = 4096
_BACKLOG = 128  # also how many connections are accepted before one of them is counted
_KEEPALIVE_SECONDS = 30.0
# Options that are numbers, with their defaults. Those whose default is not 0 must be above 0.
_NUMBERS = (
    ("--max-running-requests", 128, "number of requests in the batch"),
    ("--max-model-len", 0, "prompt and completion; 0 is the model's limit, but at most 4096"),
    ("--max-batched-tokens", 0, "tokens of a step, first of running requests; 0 chooses it"),
    ("--max-prefill-tokens", 4096, "prompt tokens of a step that no running request waits for"),
    ("--max-connections", MAX_CONNECTIONS, "at most what the limit of open files has room for"),
    ("--header-timeout", HEADER_SECONDS, "seconds within which a request's headers must arrive"),
    ("--dist-timeout", 120.0, "timeout of each weight broadcast, in seconds"),
)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchtitan.grpo.inference.embedded")
    add = parser.add_argument
    add("--model-path", required=True, help="Hugging Face directory")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000, help="0 chooses a free port and prints it")
    add("--port-file", help="file to which the port is written when the server is up")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    for name, default, text in _NUMBERS:
        add(name, type=type(default), default=default, help=text)
    add(
        "--no-cuda-graphs",
        action="store_true",
        help="launch the kernels of each decoding step one by one, which is slower",
    )
    add("--seed", type=int, help="seed of sampling; random by default")
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = _make_parser()
    arguments = parser.parse_args(argv)
    for name, default, _ in _NUMBERS:
        if default and getattr(arguments, name[2:].replace("-", "_")) <= 0:
            parser.error(f"{name} must be above 0")
    try:
        # Keys come only from the environment: other users can list command lines.
        require_keys(arguments.host, os.environ)
    except ValueError as error:
        parser.error(str(error))
    budget = arguments.max_batched_tokens
    if budget and budget <= arguments.max_running_requests:
        parser.error(
            "--max-batched-tokens must be 0 or above --max-running-requests "
            f"({arguments.max_running_requests}), got {budget}"
        )
    if arguments.max_model_len < 0:
        parser.error("--max-model-len must be 0 or above")
    return arguments


def build_server(arguments: argparse.Namespace) -> EmbeddedServer:
    """Loads the model and connects the parts of the server, without starting the engine."""
    path = arguments.model_path
    model = load_model(path, arguments.device, arguments.dtype)
    own_length = getattr(model.config, "max_position_embeddings", _DEFAULT_MAX_MODEL_LEN)
    max_model_len = arguments.max_model_len or min(own_length, _DEFAULT_MAX_MODEL_LEN)
    if max_model_len > own_length:
        raise ValueError(
            f"--max-model-len must be at most {own_length}, the model's max_position_embeddings or "
            f"sliding_window, got {max_model_len}."
        )
    on_gpu = model.device.type == "cuda"
    capture = CudaCapture(model.device) if on_gpu and not arguments.no_cuda_graphs else None
    num_slots = arguments.max_running_requests
    runner = ModelRunner(model, num_slots, max_model_len, read_known_ids(path), capture)
    seed = random.SystemRandom().getrandbits(31) if arguments.seed is None else arguments.seed
    engine = Engine(
        runner,
        seed=seed,
        step_tokens=arguments.max_batched_tokens or None,
        max_prefill_tokens=arguments.max_prefill_tokens,
    )
    return EmbeddedServer(
        engine,
        WeightUpdater(engine, WeightTable(model), runner.device, arguments.dist_timeout, path),
        ModelFacts(runner.vocab_size, max_model_len, read_eos_ids(path)),
        {
            "embedded": True,
            "model_path": path,
            "architectures": model.config.architectures,
            "tokenizer_path": path,
            "is_generation": True,
            "vocab_size": runner.vocab_size,
            "max_model_len": max_model_len,
            "max_running_requests": arguments.max_running_requests,
            "device": str(runner.device),
            "dtype": str(runner.dtype).removeprefix("torch."),
            "seed": seed,
            "group_facts": asdict(own_group_facts(runner.device)),
        },
        keys=keys_of_environment(),
    )


async def serve(arguments: argparse.Namespace) -> None:
    """Serves until a signal asks it to end, and then ends within two seconds."""
    stop = asyncio.Event()
    server = build_server(arguments)
    for signum in stop_signals():
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    site = HttpSite(
        server.make_app(), handler_cancellation=True, keepalive_timeout=_KEEPALIVE_SECONDS
    )
    _, port = await site.start(
        arguments.host,
        arguments.port,
        raise_descriptor_limit(arguments.max_connections),
        arguments.header_timeout,
        _BACKLOG,
    )
    spans.open_inherited(f"server {arguments.host}:{port}")
    server.engine.start()
    logger.info("Serving %s on http://%s:%d", arguments.model_path, arguments.host, port)
    print(f"READY http://{arguments.host}:{port}", flush=True)
    if arguments.port_file:
        write_whole(Path(arguments.port_file), f"{port}\n".encode())
    await stop.wait()
    logger.info("Stopping.")
    # The engine ends first, so that waiting requests are answered before connections close.
    await asyncio.get_running_loop().run_in_executor(None, server.engine.close, 1.0)
    server.updater.session.leave_groups()
    await site.close()


class RepeatLimit(logging.Filter):
    """Limits how often each logging statement writes in a period, and later logs how many lines it left out."""

    def __init__(self, max_lines: int = 20, period_seconds: float = 60.0) -> None:
        super().__init__()
        self._max_lines, self._period_seconds = max_lines, period_seconds
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        statement = (record.pathname, record.lineno)
        now = time.monotonic()
        began, count = self._counts.get(statement, (now, 0))
        if now - began >= self._period_seconds:
            left_out = max(0, count - self._max_lines)
            began, count = now, 0
            if left_out:
                record.msg = f"{record.msg} ({left_out} such lines were left out before.)"
        self._counts[statement] = (began, count + 1)
        return count < self._max_lines


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepeatLimit())
    # Progress bars would fill the log file.
    transformers.utils.logging.disable_progress_bar()
    arguments = parse_arguments(sys.argv[1:])
    if is_loopback(arguments.host):
        # By default gloo listens at the address that this host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    try:
        asyncio.run(serve(arguments))
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        sys.exit(1)
    except KeyboardInterrupt:
        # Ctrl-C before the signal handlers were set, while the model was being loaded.
        sys.exit(130)
    spans.close_spans()
    # The interpreter's own end would wait for gloo's threads, which wait for the trainer.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
