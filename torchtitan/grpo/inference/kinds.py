# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The table of server kinds, :data:`KINDS`, and the types that each kind's ``launch_command`` takes and returns.

Each kind has one row of the table and one folder beside this file. Every process reads the table to
check the configuration, so clients are imported on first use.
"""

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchtitan.grpo.inference.access import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from torchtitan.grpo.inference.client import Capabilities, InferenceClient
from torchtitan.grpo.types import ServerKind
from torchtitan.grpo.weight_wire.group_facts import SHARING_SETTING

if TYPE_CHECKING:
    from torchtitan.grpo.inference.http import HttpConnection

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ServerSpec:
    """Settings of one server, the same for every kind.

    ``max_model_len`` bounds prompt plus completion; 0 is as much as model and memory allow.
    ``python`` is the interpreter of the server's environment; ``None`` is the current one.
    ``extra_args`` come last on the command line and override earlier arguments. Without ``gpus``, the
    server sees the GPUs of this process. ``gpu_memory_utilization`` is a part of each GPU's memory; ``None``
    there and for ``seed`` means the server's default. If ``max_batched_tokens`` is 0,
    :func:`batched_tokens` chooses the number. With ``is_lent``, the server must be able to free its memory.
    """

    kind: ServerKind
    model_path: str
    port: int
    device: str
    dtype: str
    max_model_len: int
    max_running_requests: int
    python: str | None = None
    host: str = LOOPBACK
    api_key: str | None = None
    admin_key: str | None = None
    extra_args: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    seed: int | None = None
    max_batched_tokens: int = 0
    is_lent: bool = False


@dataclass(frozen=True)
class LaunchCommand:
    """Command that starts one server, without ``ServerSpec.extra_args``.

    The variables in ``defaults`` are overridden by the user's environment, which is overridden by the
    variables in ``keys``. Keys are never on a command line, because every user of the machine can list it.
    """

    arguments: list[str]
    defaults: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str | None] = field(default_factory=dict)


_CHOSEN_TOKENS = {"cpu": 256, "cuda": 2048}


def batched_tokens(spec: ServerSpec) -> int:
    """Returns how many tokens a vLLM or SGLang server may compute in one step.

    The default is enough to saturate the device. With more, running requests would wait longer for
    prompts. The default is at least twice the number of requests that may run, and a multiple of SGLang's
    page size.
    """
    if spec.max_batched_tokens:
        return spec.max_batched_tokens
    wanted = max(_CHOSEN_TOKENS[spec.device], 2 * spec.max_running_requests)
    return -(-wanted // 64) * 64


def seed_option(option: str, spec: ServerSpec) -> list[str]:
    return [] if spec.seed is None else [option, str(spec.seed)]


IDLE_SECONDS = 3.0
"""Time for which a client of a run keeps an idle connection. Servers must close it later (uvicorn
does after 5 s), because a request on a connection that is just being closed is lost.
"""

KEY_OPTIONS = ("--api-key", "--admin-api-key")
"""Options of servers with secret keys, which are refused and hidden."""


@dataclass(frozen=True)
class KindRow:
    """What the rest of the package knows of one kind of server.

    ``client`` is ``module:class`` of the :class:`InferenceClient`, whose module also has a function
    ``launch_command`` from a :class:`ServerSpec` to a :class:`LaunchCommand`. ``environment`` is
    the virtual environment of `scripts/install_<name>.sh`; ``None`` is the trainer's.
    The server sets ``nccl_settings`` unless its environment has other values. ``known_releases`` holds
    prefixes of the tested releases, and is empty for this project's own server. To free its memory while it
    sleeps, a server on a GPU must have been started with ``sleep_option`` (if the kind has one).
    """

    name: ServerKind
    client: str
    capabilities: Capabilities
    environment: str | None = None
    nccl_settings: Mapping[str, str] = field(default_factory=dict)
    known_releases: tuple[str, ...] = ()
    sleep_option: str = ""

    @property
    def install_script(self) -> str | None:
        return None if self.environment is None else f"scripts/install_{self.name}.sh"

    def make_client(
        self, http: "HttpConnection", request_timeout_seconds: float
    ) -> InferenceClient:
        module, _, name = self.client.partition(":")
        client = getattr(importlib.import_module(module), name)
        return client(http, self.capabilities, request_timeout_seconds=request_timeout_seconds)

    def launch_command(self, spec: ServerSpec) -> LaunchCommand:
        module, _, _ = self.client.partition(":")
        return importlib.import_module(module).launch_command(spec)


# What a server that stages buckets can do: vLLM with room for a second copy of the weights (its client
# finds out when it joins a group), and the embedded server.
_STAGING = Capabilities(
    stops_for="commit",
    verifies_checksums=True,
    takes_deltas=True,
    receives_in_parallel=True,
    receives_pieces=True,
)

_ROWS = (
    KindRow(
        name="embedded",
        client="torchtitan.grpo.inference.embedded.client:EmbeddedClient",
        capabilities=replace(_STAGING, stops_for="nothing", rates_lists=True),
    ),
    KindRow(
        name="sglang",
        client="torchtitan.grpo.inference.sglang.client:SGLangClient",
        # Its scheduler loads each bucket before it reads the next request.
        capabilities=Capabilities(stops_for="transfer", rates_lists=True),
        environment=".venv-sglang",
        nccl_settings={"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"},
        known_releases=("0.5.20", "0.5.21", "0.5.22", "0.5.23"),
        sleep_option="--enable-memory-saver",
    ),
    KindRow(
        name="vllm",
        client="torchtitan.grpo.inference.vllm.client:VLLMClient",
        capabilities=_STAGING,
        environment=".venv-vllm",
        known_releases=("0.32", "0.33"),
        sleep_option="--enable-sleep-mode",
    ),
)

KINDS: dict[ServerKind, KindRow] = {row.name: row for row in _ROWS}


def kind_row(kind: ServerKind) -> KindRow:
    """Returns the row of a kind. Raises ValueError, which lists the known kinds, for an unknown one."""
    if kind not in KINDS:
        raise ValueError(f"inference.kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    return KINDS[kind]


def refuse_keys(arguments: Sequence[str], source: str) -> None:
    given = {argument.partition("=")[0] for argument in arguments}
    if found := sorted(given.intersection(KEY_OPTIONS)):
        raise ValueError(
            f"{source} must hold no keys, because every user of the machine can list command lines, "
            f"got {', '.join(found)}. Set {API_KEY_VARIABLE} and {ADMIN_KEY_VARIABLE} in the "
            "environment."
        )


def take_nccl_setting_of(kind: ServerKind, transport: str) -> None:
    """Sets ``NCCL_CUMEM_ENABLE`` as servers of a kind do, if weights are to travel over NCCL.

    Both ends of a communicator must agree on the setting (see `weight_wire/group_facts.py`). NCCL reads
    it once in a process, so call this before any process group exists. With the transport ``auto``, this
    does nothing, because the trainer's own groups may be slower without cuMem. Servers with another
    setting then receive from host memory.
    """
    value = kind_row(kind).nccl_settings.get(SHARING_SETTING)
    if transport != "nccl" or value is None or SHARING_SETTING in os.environ:
        return
    os.environ[SHARING_SETTING] = value
    logger.info(
        "Set %s=%s, as servers of inference.kind = %r do: both ends of a group over NCCL must agree "
        "(weight_sync.transport = 'nccl'). It also holds for the communicators of training.",
        SHARING_SETTING,
        value,
        kind,
    )


def make_client(
    kind: ServerKind,
    url: str,
    *,
    api_key: str | None = None,
    admin_key: str | None = None,
    control_timeout_seconds: float = 30.0,
    request_timeout_seconds: float = 600.0,
    idle_seconds: float = 0.0,
) -> InferenceClient:
    """Returns a client for the server at ``url``. Keys that are ``None`` are read from the environment."""
    # Imported here because configuration checks read the table and need no HTTP.
    from torchtitan.grpo.inference.http import HttpConnection

    row = kind_row(kind)
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"inference.urls must be like http://host:port, got {url!r}.")
    http = HttpConnection(
        url,
        api_key=api_key or os.environ.get(API_KEY_VARIABLE),
        admin_key=admin_key or os.environ.get(ADMIN_KEY_VARIABLE),
        timeout_seconds=control_timeout_seconds,
        idle_seconds=idle_seconds,
    )
    return row.make_client(http, request_timeout_seconds)
