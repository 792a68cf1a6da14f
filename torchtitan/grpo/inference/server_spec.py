# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Input and output of each kind's ``launch_command``."""

from dataclasses import dataclass, field

from torchtitan.grpo.types import ServerKind

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ServerSpec:
    """Settings of one server, the same for every kind.

    ``max_model_len`` bounds prompt plus completion; 0 is as much as model and memory allow.
    ``python`` is the interpreter of the server's environment, ``None`` the current one.
    ``extra_args`` come last and override earlier ones. Without ``gpus``, the server sees those of
    this process. ``gpu_memory_utilization`` is a part of each GPU's memory. ``None`` there, and as
    ``seed``, leaves the server's default; 0 chooses ``max_batched_tokens``. A server that ``is_lent``
    can free its memory while it sleeps.
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

    The user's environment overrides the variables of ``defaults``; those of ``keys`` override it.
    Keys are never on a command line, because every user of the machine can list it.
    """

    arguments: list[str]
    defaults: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str | None] = field(default_factory=dict)


_CHOSEN_TOKENS = {"cpu": 256, "cuda": 2048}


def batched_tokens(spec: ServerSpec) -> int:
    """Returns the token budget of a step of a vLLM or SGLang server.

    The default saturates the device with a few running requests; more would make these wait longer.
    With many, half is left for prompts. SGLang wants a multiple of its page size.
    """
    if spec.max_batched_tokens:
        return spec.max_batched_tokens
    wanted = max(_CHOSEN_TOKENS[spec.device], 2 * spec.max_running_requests)
    return -(-wanted // 64) * 64


def seed_option(option: str, spec: ServerSpec) -> list[str]:
    return [] if spec.seed is None else [option, str(spec.seed)]
