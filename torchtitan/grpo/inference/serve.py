# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts one inference server by hand, with the options that a run needs.

    torchtitan-grpo serve KIND MODEL_DIR [--host H] [--port P] [--register FOLDER_OR_URL]
        [--interface IF] [--device D] [further server arguments]

With --register the server joins a run as soon as it is up, and leaves it when it ends; see
`registry.py`. The default host is then this machine's address on the route to the run, with a free port.

`scripts/serve_vllm.sh` and `scripts/serve_sglang.sh` run this command with the interpreter of their kind.
Mistakes that can be found before the server loads end the command at once, with one line.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit

from torchtitan.grpo.inference.access import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, require_keys
from torchtitan.grpo.inference.client import ServerError
from torchtitan.grpo.inference.http import HttpConnection
from torchtitan.grpo.inference.kinds import KINDS, LOOPBACK, ServerSpec, refuse_keys
from torchtitan.grpo.inference.local_servers import default_device, mask_keys, server_command
from torchtitan.grpo.inference.registry import BEAT_SECONDS, Registration, RegistryFolder
from torchtitan.grpo.inference.urls import checked_urls, url_of
from torchtitan.grpo.system.child import start_child, stop_children
from torchtitan.grpo.system.network import address_of, default_address, source_address
from torchtitan.grpo.system.stop import stop_signals
from torchtitan.grpo.types import ServerKind
from torchtitan.grpo.weight_wire.model_folder import read_json, refuse_quantised

_REQUEST_SECONDS = 5.0
_STOP_SECONDS = 5.0


class _Stopped(KeyboardInterrupt):
    """A signal asked the process to end. (An event loop would swallow a signal handler's other exceptions.)"""


class Registrar:
    """Keeps one server registered in a folder or at a registry's URL. A URL needs a key."""

    def __init__(self, target: str, registration: Registration, key: str | None) -> None:
        self._target, self._registration, self._key = target, registration, key
        self._said = ""

    def beat(self) -> None:
        """Registers the server, or renews its registration. Reports a failure once; the next call tries again."""
        self._registration = self._registration.next()
        try:
            self._send("PUT")
            text = f"{self._registration.url} is registered at {self._target}"
        except (OSError, ServerError) as error:
            text = (
                f"cannot register at {self._target}: {type(error).__name__}: {error}. It is tried "
                "again."
            )
        if text != self._said:
            self._said = text
            _say(text)

    def leave(self) -> None:
        """Removes the server from the registry, if it can be reached."""
        try:
            self._send("DELETE")
        except (OSError, ServerError) as error:
            _say(
                f"cannot leave {self._target}: {type(error).__name__}: {error}. It counts as dead in 30 s."
            )

    def _send(self, method: str) -> None:
        if self._target.startswith(("http://", "https://")):
            request(self._target, method, "/servers", asdict(self._registration), self._key)
            return
        folder = RegistryFolder(self._target)
        (folder.write if method == "PUT" else folder.remove)(self._registration)


def request(url: str, method: str, route: str, body: object = None, key: str | None = None) -> None:
    """Sends a request as the trainer does. Raises ServerError if it fails or takes too long."""

    async def send() -> None:
        connection = HttpConnection(
            url, api_key=key, admin_key=key, timeout_seconds=_REQUEST_SECONDS
        )
        try:
            await connection.request(method, route, body)
        finally:
            await connection.close()

    asyncio.run(send())


def run_registered(
    command: Sequence[str], environ: Mapping[str, str], registrar: Registrar, url: str
) -> int:
    """Runs a server until it or this process is asked to end, registered while it is up at ``url``.

    Returns the server's exit status, or 0 if this process was asked to end.
    """

    handled = stop_signals()

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped

    for signum in handled:
        signal.signal(signum, stop)
    server = start_child(command, env=dict(environ))
    is_up = False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return server.wait(timeout=BEAT_SECONDS)
            if not is_up:
                with contextlib.suppress(ServerError):
                    request(url, "GET", "/health")
                    is_up = True
            if is_up:
                registrar.beat()
    except _Stopped:
        return 0
    finally:
        if is_up:
            registrar.leave()  # first, so that no request is sent to a server that ends
        stop_children([server], _STOP_SECONDS)


def _say(text: str) -> None:
    print(f"[register] {text}", file=sys.stderr, flush=True)


_PORT = 8000
_REPOSITORY = Path(__file__).resolve().parents[3]


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, without printing the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchtitan-grpo serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Further arguments of the embedded server are listed by `python -m "
        "torchtitan.grpo.inference.embedded --help`; those of vLLM and SGLang are their own.",
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("model_path", help="Hugging Face directory")
    parser.add_argument("--python", help="the server's interpreter")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, help="8000; with --register a free port")
    parser.add_argument(
        "--register", help="shared folder (inference.registry), or http://host:port of rank 0"
    )
    parser.add_argument("--interface", default=os.environ.get("GRPO_INTERFACE") or None)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        help="0 is the model's own, from its config.json; in the embedded server, at most 4096",
    )
    parser.add_argument("--max-running-requests", type=int, default=64)
    return parser


def parse_arguments(arguments: list[str]) -> tuple[ServerSpec, str | None]:
    """Returns the settings of the server, with unknown arguments as ``extra_args``, and its registry."""
    parser = _make_parser()
    options, extra = parser.parse_known_args(arguments)
    try:
        if options.register is not None and _is_url(options.register):
            checked_urls([options.register], "--register")
        config = model_config(options.model_path)
        check_length(options.max_model_len, config, options.model_path)
        if options.kind == "embedded":
            refuse_quantised(config, Path(options.model_path, "config.json"), "MODEL_DIR")
        host = options.host or choose_host(options.register, options.interface)
        check_register(options.register, host)
        require_keys(host, os.environ)
        refuse_keys(extra, "Further arguments")
        any_port = 0 if options.register is not None else _PORT
        port = open_port(host, any_port if options.port is None else options.port)
        device = choose_device(options.device)
        python = options.python or interpreter_of(options.kind)
    except ValueError as error:
        parser.error(str(error))
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    spec = ServerSpec(
        kind=options.kind,
        model_path=str(Path(options.model_path).resolve()),
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        max_model_len=options.max_model_len,
        max_running_requests=options.max_running_requests,
        python=python,
        api_key=os.environ.get(API_KEY_VARIABLE),
        admin_key=os.environ.get(ADMIN_KEY_VARIABLE),
        extra_args=tuple(extra),
    )
    return spec, options.register


def choose_host(register: str | None, interface: str | None) -> str:
    if interface is not None:
        return address_of(interface)
    if register is None:
        return LOOPBACK
    try:
        if not _is_url(register):
            return default_address()
        url = urlsplit(register)
        return source_address(url.hostname or "", url.port or 80)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--register {register} leads to no route by which the run would reach this server: "
            f"{error}. Name --interface, or --host with an address of this host."
        ) from error


def check_register(register: str | None, host: str) -> None:
    if register is None:
        return
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(
            f"--register needs --host with the address by which the run reaches this server, got "
            f"{host!r}. Leave --host out for the address on the route, or name --interface."
        )
    if _is_url(register) and not os.environ.get(ADMIN_KEY_VARIABLE):
        raise ValueError(
            "--register with a URL needs the run's admin key: set the environment variable "
            f"{ADMIN_KEY_VARIABLE}."
        )


def open_port(host: str, port: int) -> int:
    """Returns the port, or a free port for 0. Raises ValueError if the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if port:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return probe.getsockname()[1]
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"--host {host} --port {port} must be free to listen on: {error}. Name an address of "
                "this host, end the program that listens there, or choose another port with --port."
            ) from error


def _is_url(register: str) -> bool:
    return register.startswith(("http://", "https://"))


def model_config(model_path: str) -> dict[str, Any]:
    folder = Path(model_path)
    if not folder.is_dir():
        raise ValueError(
            "MODEL_DIR must be a Hugging Face directory with a config.json, but there is no directory "
            f"{folder}. Fetch the model with `hf download NAME --local-dir DIR`, or correct the path."
        )
    return read_json(folder / "config.json", "MODEL_DIR")


def check_length(max_model_len: int, config: dict[str, Any], model_path: str) -> None:
    own = config.get("max_position_embeddings")
    # With rope scaling, a server may allow more than the number in config.json.
    is_scaled = (config.get("rope_scaling") or {}).get("rope_type", "default") != "default"
    if isinstance(own, int) and max_model_len > own and not is_scaled:
        raise ValueError(
            f"--max-model-len must be at most {own} (max_position_embeddings in "
            f"{model_path}/config.json), got {max_model_len}. Lower it, or leave it out for the "
            "model's own."
        )


def choose_device(device: str) -> str:
    visible = default_device(os.environ)
    if device == "cuda" and visible != "cuda":
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ValueError(
            "--device cuda needs a GPU, but none is visible (CUDA_VISIBLE_DEVICES is "
            f"{hidden!r}). Check nvidia-smi, or serve on the CPU with --device cpu."
        )
    if device == "auto" and visible == "cpu":
        print("No GPU is visible: the server runs on the CPU.", flush=True)
    return visible if device == "auto" else device


def interpreter_of(kind: ServerKind) -> str:
    row = KINDS[kind]
    if row.environment is None:
        return sys.executable
    named = os.environ.get(f"TORCHTITAN_GRPO_{kind.upper()}_PYTHON")
    python = Path(named) if named else _REPOSITORY / row.environment / "bin" / "python"
    if not python.is_file():
        raise ValueError(
            f"A {kind} server needs an environment of its own, but {python} does not exist. Run "
            f"`bash {row.install_script}`, or name the interpreter with --python."
        )
    return str(python)


def main() -> None:
    """Replaces this process with the server, or runs the server as a child and registers it."""
    spec, register = parse_arguments(sys.argv[1:])
    command, environ = server_command(spec, os.environ)
    print(f"+ {shlex.join(mask_keys(command))}", flush=True)
    try:
        if register is None:
            os.execve(command[0], command, environ)
        url = url_of(spec.host, spec.port)
        registration = Registration(url, spec.kind, socket.gethostname(), os.getpid(), time.time())
        target = register if _is_url(register) else str(Path(register).resolve())
        registrar = Registrar(target, registration, os.environ.get(ADMIN_KEY_VARIABLE))
        sys.exit(run_registered(command, environ, registrar, url))
    except OSError as error:
        sys.exit(f"error: the interpreter {command[0]} cannot be run: {error}.")


if __name__ == "__main__":
    main()
