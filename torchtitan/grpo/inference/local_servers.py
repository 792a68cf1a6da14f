# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts inference servers on this machine, as child processes that end with the run."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.grpo.config.cluster import server_groups
from torchtitan.grpo.inference.access import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from torchtitan.grpo.inference.gpu_shares import share_gpus
from torchtitan.grpo.inference.kinds import KEY_OPTIONS, LOOPBACK, ServerSpec, kind_row
from torchtitan.grpo.inference.server_log import first_causes, last_line, log_tail, remedy
from torchtitan.grpo.inference.urls import url_of
from torchtitan.grpo.system.child import describe_status, start_child, stop_children
from torchtitan.grpo.system.environment import without_keys
from torchtitan.grpo.system.network import interface_of, is_loopback, loopback_interface
from torchtitan.grpo.system.private_folders import (
    make_private_folder,
    note_held,
    remove_private_folder,
)
from torchtitan.grpo.types import ServerKind

if TYPE_CHECKING:
    from torchtitan.grpo.config import Inference, RolloutProcessConfig

# A server has a TMPDIR of its own. Code that torch compiled stays where it is, and precompiled headers,
# which torch keeps in TMPDIR, are off: each server would compile them anew.
_TORCH_DEFAULTS = {
    "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}


@dataclass(frozen=True)
class LaunchedServer:
    """A server that this process started.

    The server's workers are in the session of ``process``. Its temporary ``folder`` is removed when the
    server is stopped. The server's output begins at byte ``log_begin`` of the log.
    """

    spec: ServerSpec
    process: subprocess.Popen
    log_file: Path
    folder: Path | None = None
    log_begin: int = 0

    @property
    def kind(self) -> ServerKind:
        return self.spec.kind

    @property
    def url(self) -> str:
        return url_of(self.spec.host, self.spec.port)

    def note_shared_memory(self) -> None:
        """Records the server's shared memory, so that it can be removed if the server leaves it behind."""
        if self.folder is not None:
            note_held(self.process.pid, self.folder)

    def stop(self, grace_seconds: float = 3.0) -> None:
        stop_servers([self], grace_seconds)

    def describe_end(self) -> str:
        found = remedy(self.log_file, self.log_begin) + first_causes(self.log_file, self.log_begin)
        status = describe_status(self.process.returncode)
        return (
            f"The {self.kind} server {self.url} ended with {status}. {found}{self.describe_log()}"
        )

    def describe_log(self) -> str:
        tail = log_tail(self.log_file, self.log_begin)
        if not tail.strip():
            return f"It has written nothing into its log {self.log_file}."
        return f"The end of its log {self.log_file}:\n{tail}"

    def last_line(self) -> str:
        return last_line(self.log_file, self.log_begin)


def server_command(
    spec: ServerSpec, environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment of a server. ``environ`` overrides the launcher's defaults."""
    command = kind_row(spec.kind).launch_command(spec)
    # As `python -m` would search the current folder first.
    defaults = {"PYTHONSAFEPATH": "1", **command.defaults}
    own_keys = {API_KEY_VARIABLE: spec.api_key, ADMIN_KEY_VARIABLE: spec.admin_key} | command.keys
    kept = without_keys(environ, own_keys)
    # Without bytecode files, each start would spend a minute on compiling the server's sources.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    if spec.device == "cpu":
        defaults["OMP_NUM_THREADS"] = "1"  # `share_cores` has set it under `train` and `evaluate`
    elif spec.gpus:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    if is_loopback(spec.host):
        # By default gloo listens at the address that this host's name resolves to.
        defaults["GLOO_SOCKET_IFNAME"] = loopback_interface()
    elif (interface := interface_of(spec.host)) is not None:
        # The trainer reaches the server there, so its weight groups belong there as well.
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    keys = {name: key for name, key in own_keys.items() if key}
    return command.arguments + list(spec.extra_args), {**defaults, **kept, **keys}


def set_random_keys(inference: "Inference", environ: MutableMapping[str, str]) -> None:
    """Sets random keys for launched servers in ``environ``, rank 0's environment, if the user has set none.

    Without keys, other users of the machine could generate on the servers and replace their weights.
    """
    if not inference.launch:
        return
    for key, variable in (
        (inference.api_key, API_KEY_VARIABLE),
        (inference.admin_key, ADMIN_KEY_VARIABLE),
    ):
        if not key and not environ.get(variable):
            environ[variable] = secrets.token_urlsafe(24)


def mask_keys(command: Sequence[str]) -> list[str]:
    """Returns a command line for printing, with ``***`` in place of keys."""
    shown: list[str] = []
    for argument in command:
        option, equals, _ = argument.partition("=")
        if shown and shown[-1] in KEY_OPTIONS:
            argument = "***"
        elif equals and option in KEY_OPTIONS:
            argument = f"{option}=***"
        shown.append(argument)
    return shown


def server_specs(
    config: "RolloutProcessConfig", environ: Mapping[str, str], ports: Sequence[int]
) -> list[ServerSpec]:
    inference = config.inference
    device = inference.device if inference.device != "auto" else default_device(environ)
    gpus = config.gpus if device == "cuda" else []
    num_heads = None
    if gpus and inference.kind != "embedded":  # that one computes on one GPU
        content = (Path(config.hf_assets_path) / "config.json").read_bytes()
        num_heads = json.loads(content).get("num_attention_heads")
    max_running = -(-config.rollout.max_concurrent_rollouts // len(ports))
    if config.rollout.deterministic:
        max_running = 1  # the last bits of a row's logits depend on the number of rows beside it
    groups = server_groups(config)
    are_lent = [group.is_lent for group in groups for _ in range(group.num_servers)]
    shares = share_gpus(
        groups,
        gpus,
        config.num_training_gpus,
        tensor_parallel_size=inference.tensor_parallel_size,
        memory=inference.gpu_memory_utilization,
        num_heads=num_heads,
        lent_part=config.lent_part,
    )
    return [
        ServerSpec(
            kind=inference.kind,
            # Absolute, because the server runs in another directory.
            model_path=str(Path(config.hf_assets_path).resolve()),
            # Ranks on other nodes push weights to it, too.
            host=config.fetch_host or LOOPBACK,
            port=port,
            device=device,
            dtype=inference.dtype,  # `controller.server_dtype` has resolved "auto"
            max_model_len=inference.max_model_len or config.seq_len,
            max_running_requests=max_running,
            # Absolute, like the model's directory; not resolved, because a link to an interpreter
            # belongs to its environment.
            python=os.path.abspath(inference.python) if inference.python else None,
            api_key=inference.api_key or environ.get(API_KEY_VARIABLE),
            admin_key=inference.admin_key or environ.get(ADMIN_KEY_VARIABLE),
            extra_args=tuple(inference.extra_args),
            gpus=share.gpus,
            tensor_parallel_size=share.tensor_parallel_size,
            gpu_memory_utilization=share.memory,
            # Servers with equal seeds would sample equal completions of a prompt.
            seed=config.seed + index,
            max_batched_tokens=inference.max_batched_tokens,
            is_lent=is_lent,
        )
        for index, (port, share, is_lent) in enumerate(zip(ports, shares, are_lent, strict=True))
    ]


def start_servers(config: "RolloutProcessConfig", ports: Sequence[int]) -> list[LaunchedServer]:
    """Starts a server on each port, and does not wait until they are up.

    Call it on the main thread, because the servers end with the thread that starts them. Raises ValueError
    if ``inference.python`` cannot be run, or if there are too few GPUs.
    """
    specs = server_specs(config, os.environ, ports)
    folder = Path(config.dump_folder).resolve() / "servers"
    servers: list[LaunchedServer] = []
    try:
        for index, spec in enumerate(specs):
            servers.append(start_server(spec, folder / f"{spec.kind}-{index}.log"))
    except BaseException:
        stop_servers(servers)
        raise
    return servers


def start_server(spec: ServerSpec, log_file: Path, *, keep_log: bool = False) -> LaunchedServer:
    """Starts one server; see :func:`start_servers`. With ``keep_log``, appends to an earlier log."""
    command, environ = server_command(spec, os.environ)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    if not keep_log:
        log_file.unlink(missing_ok=True)
    log_begin = log_file.stat().st_size if log_file.exists() else 0
    folder = make_private_folder("server")
    try:
        # In another directory: `-m` makes the working directory importable, and with it the
        # overlay's `torchtitan` folder.
        process = start_child(
            command,
            env=_TORCH_DEFAULTS | environ | {"TMPDIR": str(folder)},
            log_file=log_file,
            cwd=str(log_file.parent),
        )
    except OSError as error:
        folder.rmdir()
        script = kind_row(spec.kind).install_script
        remedy = "" if script is None else f" Run `bash {script}` to install one."
        raise ValueError(
            f"inference.python must be an interpreter that can run a {spec.kind} server, got "
            f"{spec.python!r}: {error}.{remedy}"
        ) from error
    return LaunchedServer(spec, process, log_file, folder, log_begin)


def stop_servers(servers: Sequence[LaunchedServer], grace_seconds: float = 3.0) -> None:
    for server in servers:
        server.note_shared_memory()
    stop_children([server.process for server in servers], grace_seconds)
    for server in servers:
        if server.folder is not None:
            remove_private_folder(server.folder)


class HeldPorts:
    """Holds distinct free ports, so that Linux gives none of them to an outgoing connection.

    A restarted server must find its port free. Each port is held by a socket that is bound to it but does
    not listen. Servers can still listen there, because all kinds set SO_REUSEADDR.
    """

    def __init__(self, count: int) -> None:
        self._sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
        for holder in self._sockets:
            # Bound before SO_REUSEADDR is set: with that option, the kernel may choose a port twice.
            holder.bind((LOOPBACK, 0))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.ports: list[int] = [holder.getsockname()[1] for holder in self._sockets]
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        for holder in self._sockets:
            holder.close()


def default_device(environ: Mapping[str, str]) -> str:
    # torch.cuda is not asked, because processes without torch use this module.
    hidden = environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return "cuda" if Path("/dev/nvidiactl").exists() and not hidden else "cpu"
