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
import signal
import sys
from dataclasses import asdict

import transformers
from aiohttp import web

from torchtitan.grpo.inference.embedded.engine import Engine
from torchtitan.grpo.inference.embedded.generate_json import ModelFacts
from torchtitan.grpo.inference.embedded.model import (
    ModelRunner,
    load_model,
    load_tokenizer,
    read_eos_ids,
)
from torchtitan.grpo.inference.embedded.server import EmbeddedServer
from torchtitan.grpo.inference.embedded.updates import WeightUpdater
from torchtitan.grpo.inference.embedded.weights import WeightTable
from torchtitan.grpo.inference.http import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from torchtitan.grpo.weight_wire.own_group_facts import own_group_facts

logger = logging.getLogger("torchtitan.grpo.inference.embedded")

_DEFAULT_MAX_MODEL_LEN = 4096


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parses the command line. Unknown arguments end the process with a message."""
    parser = argparse.ArgumentParser(prog="torchtitan.grpo.inference.embedded")
    add = parser.add_argument
    add("--model-path", required=True, help="Hugging Face directory")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000, help="0 chooses a free port and prints it")
    add("--port-file", help="file to which the port is written when the server is up")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    add(
        "--max-running-requests",
        type=int,
        default=128,
        help="maximum number of requests in the batch",
    )
    add(
        "--max-model-len",
        type=int,
        default=0,
        help="prompt and completion together; 0 is the model's own limit, but at most 4096",
    )
    add(
        "--max-batched-tokens",
        type=int,
        default=0,
        help="maximum number of tokens of a step, running requests first and prompts with what is "
        "left; 0 chooses it",
    )
    add(
        "--max-prefill-tokens",
        type=int,
        default=4096,
        help="maximum number of prompt tokens of a step that no running request waits for",
    )
    # Other users of the machine can list command lines, but not environments.
    for option, variable, routes in (
        ("--api-key", API_KEY_VARIABLE, "generation"),
        ("--admin-api-key", ADMIN_KEY_VARIABLE, "control"),
    ):
        default = os.environ.get(variable)
        add(option, default=default, help=f"key of {routes} routes; else ${variable}, else none")
    add("--seed", type=int, help="seed of sampling; random by default")
    add(
        "--dist-timeout",
        type=float,
        default=120.0,
        help="timeout of each weight broadcast, in seconds",
    )
    arguments = parser.parse_args(argv)
    for name in ("max_running_requests", "max_prefill_tokens", "dist_timeout"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
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
    """Loads the model and connects the parts of the server. The engine is not started yet."""
    path = arguments.model_path
    model = load_model(path, arguments.device, arguments.dtype)
    own_length = getattr(model.config, "max_position_embeddings", _DEFAULT_MAX_MODEL_LEN)
    max_model_len = arguments.max_model_len or min(own_length, _DEFAULT_MAX_MODEL_LEN)
    if max_model_len > own_length:
        raise ValueError(
            f"--max-model-len must be at most the model's max_position_embeddings, {own_length}, "
            f"got {max_model_len}."
        )
    runner = ModelRunner(model, arguments.max_running_requests, max_model_len)
    table = WeightTable(model)
    seed = random.SystemRandom().getrandbits(31) if arguments.seed is None else arguments.seed
    return EmbeddedServer(
        lambda report: Engine(
            runner,
            report,
            seed=seed,
            step_tokens=arguments.max_batched_tokens or None,
            max_prefill_tokens=arguments.max_prefill_tokens,
        ),
        lambda engine: WeightUpdater(engine, table, runner.device, arguments.dist_timeout),
        table,
        ModelFacts(runner.vocab_size, max_model_len, read_eos_ids(path), load_tokenizer(path)),
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
        api_key=arguments.api_key,
        admin_api_key=arguments.admin_api_key,
    )


async def serve(arguments: argparse.Namespace) -> None:
    """Serves until SIGTERM or SIGINT, and then ends within two seconds."""
    stop = asyncio.Event()
    server = build_server(arguments)
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    runner = web.AppRunner(
        server.make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.3
    )
    await runner.setup()
    site = web.TCPSite(runner, arguments.host, arguments.port)
    await site.start()
    server.engine.start()
    port = runner.addresses[0][1]
    logger.info("Serving %s on http://%s:%d", arguments.model_path, arguments.host, port)
    print(f"READY http://{arguments.host}:{port}", flush=True)
    if arguments.port_file:
        write_port_file(arguments.port_file, port)
    await stop.wait()
    logger.info("Stopping.")
    # The engine ends first, so that waiting requests are answered before connections close.
    await asyncio.get_running_loop().run_in_executor(None, server.engine.close, 1.0)
    server.updater.close()
    await runner.cleanup()


def write_port_file(path: str, port: int) -> None:
    """Writes the port to a file, completely or not at all, for the program that chose port 0."""
    partial = f"{path}.partial"
    with open(partial, "w") as file:
        file.write(f"{port}\n")
    os.replace(partial, path)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Progress bars would fill the log file.
    transformers.utils.logging.disable_progress_bar()
    arguments = parse_arguments(sys.argv[1:])
    try:
        asyncio.run(serve(arguments))
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        sys.exit(1)
    except KeyboardInterrupt:
        # Ctrl-C before the signal handlers were set, while the model was being loaded.
        sys.exit(130)
    # The interpreter's own end would wait for gloo's threads, which wait for the trainer.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
