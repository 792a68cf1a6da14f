# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Input and output of each kind's ``launch_command``."""

from dataclasses import dataclass, field

from torchtitan.grpo.types import ServerKind

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ServerSpec:
    """Settings of one server, the same for every kind.

    Attributes:
        max_model_len: Longest prompt plus completion; 0 is as much as model and memory allow.
        max_running_requests: Maximum number of completions that are sampled at once.
        python: Interpreter of the server's environment; ``None`` is the current one.
        extra_args: Command-line arguments appended last; they override earlier ones.
        gpus: GPUs that are visible to the server; if empty, those of this process.
        gpu_memory_utilization: Part of each GPU's memory; ``None`` leaves the server's default. The
            embedded server takes what it needs.
        seed: ``None`` leaves the server's default.
        max_batched_tokens: See ``inference.max_batched_tokens``; 0 chooses it.
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

    The default saturates the device with a few running requests; more would only make these wait
    longer. With many, half is left for prompts. SGLang wants a multiple of its page size.
    """
    if spec.max_batched_tokens:
        return spec.max_batched_tokens
    wanted = max(_CHOSEN_TOKENS[spec.device], 2 * spec.max_running_requests)
    return -(-wanted // 64) * 64


def seed_option(option: str, spec: ServerSpec) -> list[str]:
    return [] if spec.seed is None else [option, str(spec.seed)]
