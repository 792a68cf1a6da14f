# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[inference]`` table: the servers that generate rollouts."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least
from torchtitan.grpo.types import ServerKind


@dataclass
class Inference:
    """``[inference]``: the servers that generate rollouts."""

    kind: ServerKind = "embedded"
    """Kind of the servers. ``embedded`` is this project's own small server, which needs no further
    installation. ``vllm`` and ``sglang`` need an environment of their own, see ``python``."""

    urls: list[str] = field(default_factory=list)
    """Base URLs of running servers, ``http://host:port``. Exactly one of ``urls``, ``urls_file``,
    ``launch`` and a registry (``registry`` or ``registry_address``) must be set."""

    urls_file: str | None = None
    """File with the base URL of one server in each line, in place of ``urls``. Lines that begin with
    # are skipped. The file is read again when it changes, and when rank 0 receives SIGHUP: servers
    that are new in it join the run, and servers that it no longer names leave the run. A file that
    names no server, or has a line that is no URL, changes nothing. Send SIGHUP to the process whose
    id the log names at the start; torchrun itself would end the run."""

    registry: str | None = None
    """Folder, on a disk that servers and rank 0 share, in which servers register themselves
    (``serve --register FOLDER``), in place of ``urls``. The run begins as soon as one server is
    registered, at most ``startup_timeout_seconds`` later. Servers that register afterwards join it,
    and servers that end, or are silent for 30 s, leave it, except for the last one. Whoever can
    write to the folder is sent prompts and the servers' keys."""

    registry_address: str | None = None
    """``host:port`` at which the rollout process takes registrations over HTTP, for servers that
    share no disk with rank 0 (``serve --register http://host:port``); ``host`` is an address of rank
    0's host. It needs ``admin_key``, which the servers send. Registrations are written to
    ``registry``, or to the folder ``registry`` in ``job.dump_folder``."""

    launch: bool = False
    """Start ``num_servers`` servers on this machine, on free ports, and stop them at the end of the
    run."""

    num_servers: Annotated[int, at_least(1)] = 1
    """Number of servers that ``launch`` starts."""

    python: str | None = None
    """Python interpreter that runs launched servers. None is the interpreter of the trainer, which
    suits the embedded server. vLLM and SGLang need environments of their own, see
    scripts/install_vllm.sh and scripts/install_sglang.sh."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of launched servers. ``auto`` takes CUDA if there is a GPU."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the weights in launched servers. ``auto`` takes float32 on CPU and bfloat16 on
    CUDA."""

    tensor_parallel_size: Annotated[
        int, at_least(1).or_value(0, "as many of its GPUs as divide the attention heads")
    ] = 0
    """Number of GPUs that each launched vLLM or SGLang server divides the model among. The GPUs that
    no training rank uses are divided among the servers; without spare ones, servers share the GPUs
    of training. On CPU, 0 is 1."""

    gpu_memory_utilization: Annotated[
        float,
        above(0).at_most(1).or_value(0, "the server's default, or a part of a GPU that is shared"),
    ] = 0.0
    """Part of each GPU's memory that a launched vLLM or SGLang server may use
    (``--gpu-memory-utilization``, ``--mem-fraction-static``). With 0, servers on the GPUs of training
    get 0.4 together, and servers that share another GPU get 0.9 together."""

    max_model_len: Annotated[int, at_least(1).or_value(0, "training.seq_len")] = 0
    """Maximum length of a sequence on launched servers, in tokens. It must fit the longest prompt
    with ``rollout.max_new_tokens``."""

    max_batched_tokens: Annotated[int, at_least(1).or_value(0, "chosen by the kind")] = 0
    """Maximum number of tokens that a launched server computes in one step (chunked prefill). Each
    running request has one token in a step, and prompts get what is left, so a long prompt makes
    running requests wait for no more than a step of this size. It must be above
    ``rollout.max_concurrent_rollouts`` divided by ``num_servers``. It is vLLM's
    ``--max-num-batched-tokens`` and SGLang's ``--chunked-prefill-size``, which must be a multiple
    of its page size. With 0, vLLM and SGLang get 2,048 on a GPU and 256 on a CPU, or twice the
    number of running requests if that is more. The embedded server then adds 512 on a GPU, and
    half as many on a CPU, to the number of running requests."""

    extra_args: list[str] = field(default_factory=list)
    """Further command line arguments of launched servers, passed on unchanged. Each server also gets
    a sampling seed: ``debug.seed`` plus the index of the server."""

    api_key: str | None = None
    """Key for the routes that generate. None reads the environment variable
    ``TORCHTITAN_GRPO_API_KEY``. Without either, servers that the run launches get a random key."""

    admin_key: str | None = None
    """Key for the routes that control a server. None reads the environment variable
    ``TORCHTITAN_GRPO_ADMIN_KEY``. Without either, servers that the run launches get a random key, and
    other servers are sent ``api_key``."""

    startup_timeout_seconds: Annotated[float, above(0)] = 300.0
    """Maximum time until a server, launched or not, answers that it is ready."""

    max_restarts: Annotated[int, at_least(0)] = 3
    """How often each launched server is started again after it ended unexpectedly."""

    restart_seconds: Annotated[float, above(0)] = 5.0
    """Pause before a launched server is started again. It doubles with each restart of that
    server."""

    control_timeout_seconds: Annotated[float, above(0)] = 30.0
    """Maximum duration of one control request to a server, such as pausing it or reading its
    version."""
