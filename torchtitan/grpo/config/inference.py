# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The tables ``[inference]``, the servers that generate, and ``[weight_sync]``, how they get weights."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.grpo.config.bounds import above, at_least
from torchtitan.grpo.types import ServerKind


@dataclass
class Inference:
    """``[inference]``: the servers that generate rollouts."""

    kind: ServerKind = "embedded"
    """Kind of the servers. ``embedded`` is this project's own small server, which needs no
    additional installation. ``vllm`` and ``sglang`` need their own Python environment; see
    ``python``."""

    urls: list[str] = field(default_factory=list)
    """Base URLs of running servers, ``http://host:port``. Exactly one of ``urls``, ``urls_file``,
    ``launch`` and a registry (``registry`` or ``registry_address``) must be set."""

    urls_file: str | None = None
    """Experimental: File with the base URL of one server per line, instead of ``urls``. Lines
    that begin with # are skipped. The file is read again when it changes, and when rank 0
    receives SIGHUP: servers that were added to it join the run, and servers that were removed
    from it leave the run. A file that contains no server, or a line that is not a URL, changes
    nothing. Send SIGHUP to the process whose id is logged at the start; one to the launcher
    ends the run."""

    registry: str | None = None
    """Folder in which servers register themselves (``serve --register FOLDER``), instead of
    ``urls``. It is on a disk that the servers share with rank 0. The run begins as soon as one
    server is registered, which must happen within ``startup_timeout_seconds``. Servers that
    register later join the run. Servers that end, or send no heartbeat for 30 s, leave it, except
    for the last one. Anyone who can write to the folder can receive the prompts and the keys of the
    servers."""

    registry_address: str | None = None
    """``host:port`` at which the rollout process accepts registrations over HTTP, for servers that
    share no disk with rank 0 (``serve --register http://host:port``). ``host`` is an address of
    rank 0's host. Needs ``admin_key``, which the servers send. Registrations are written to
    ``registry``, or to the folder ``registry`` in ``job.dump_folder``."""

    launch: bool = False
    """Start ``num_servers`` servers, or those of ``[cluster]``, on this machine, on free ports, and
    stop them at the end of the run."""

    num_servers: Annotated[int, at_least(1)] = 1
    """Number of servers that ``launch`` starts without ``[cluster]``."""

    lend: bool = False
    """Lend the devices of the training ranks to the launched servers. The servers sleep while the
    ranks train, and generate while the ranks wait for rollouts, with the memory that a waiting rank
    leaves. All launched servers are lent, so there must be no GPU without a training rank; with
    ``[cluster]``, servers on other GPUs generate all the time. Needs ``launch``,
    ``grpo.async_weight_update = true`` and no ``rollout.stream``. ``optimizer.offload_while_lent``
    and ``grpo.ref_model_offload`` leave more memory to the servers."""

    sleep_timeout_seconds: Annotated[float, above(0)] = 30.0
    """Experimental: Maximum time until a lent server sleeps when the ranks need their devices,
    and after which one that was lost while it generated is given up as soon as another attempt
    to reach it fails. The server is killed, training goes on, and the server is started again
    while devices are lent."""

    python: str | None = None
    """Python interpreter that runs launched servers. With None, it is the interpreter of the
    trainer, which works for the embedded server. vLLM and SGLang need their own environments; see
    scripts/install_vllm.sh and scripts/install_sglang.sh."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Experimental: Device of launched servers. ``auto`` uses CUDA if there is a GPU."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the weights in launched servers. ``auto`` is bfloat16 on CUDA. On a CPU, it is that in
    which the trainer computes (``training.mixed_precision_param``) if that is bfloat16 and the CPU
    multiplies matrices in it at least a third faster than in float32, as is measured at the start;
    otherwise it is float32."""

    tensor_parallel_size: Annotated[
        int,
        at_least(1).or_value(0, "the largest number of its GPUs that divides the attention heads"),
    ] = 0
    """Number of GPUs over which each launched vLLM or SGLang server shards the model. The GPUs that
    no training rank uses are divided among the servers; if there are none, the servers share the
    GPUs of the training ranks. On CPU, 0 means 1."""

    gpu_memory_utilization: Annotated[
        float,
        above(0).at_most(1).or_value(0, "the server's default, or a fraction of a shared GPU"),
    ] = 0.0
    """Fraction of each GPU's memory that a launched vLLM or SGLang server may use
    (``--gpu-memory-utilization``, ``--mem-fraction-static``). With 0, servers that share a GPU with
    training get 0.4 in total, and servers that share another GPU get 0.9 in total. Servers to which
    GPUs are lent (``lend``) get what a waiting training rank leaves; ``--dry-run`` shows it."""

    max_model_len: Annotated[int, at_least(1).or_value(0, "training.seq_len")] = 0
    """Maximum sequence length of launched servers, in tokens. It must be large enough for the
    longest prompt plus ``rollout.max_new_tokens``."""

    max_batched_tokens: Annotated[int, at_least(1).or_value(0, "depends on the kind")] = 0
    """Maximum number of tokens that a launched server computes in one step (chunked prefill), above
    ``rollout.max_concurrent_rollouts`` divided by the number of servers; docs/servers.md describes it.
    For SGLang it must be a multiple of the page size. With 0, vLLM and SGLang get 2,048 on a GPU
    and 256 on a CPU, or twice the number of running requests if that is more. The embedded server
    gets the number of running requests plus 512 on a GPU, or plus half of that number, but at least
    16, on a CPU."""

    extra_args: list[str] = field(default_factory=list)
    """Additional command-line arguments of launched servers, passed unchanged. Each server also
    gets a sampling seed: ``debug.seed`` plus the index of the server."""

    api_key: str | None = None
    """Key for the routes that generate. With None, it is read from the environment variable
    ``TORCHTITAN_GRPO_API_KEY``. If neither is set, servers that the run launches get a random
    key."""

    admin_key: str | None = None
    """Key for the routes that control a server. With None, it is read from the environment variable
    ``TORCHTITAN_GRPO_ADMIN_KEY``. If neither is set, servers that the run launches get a random
    key, and ``api_key`` is sent to other servers."""

    startup_timeout_seconds: Annotated[float, above(0)] = 300.0
    """Maximum time until a server, launched or not, reports that it is ready."""

    max_restarts: Annotated[int, at_least(0)] = 3
    """Maximum number of times in a row that each launched server is restarted after it ended
    unexpectedly. A server that has been up for ten minutes after a restart counts from 0 again.
    Measured by ``benchmarks/exactly_once.py``."""

    restart_seconds: Annotated[float, above(0)] = 5.0
    """Delay before a launched server is restarted. It doubles with each restart in a row of
    that server, up to ``max_restart_seconds``. Measured by ``benchmarks/exactly_once.py``."""

    max_restart_seconds: Annotated[float, above(0)] = 60.0
    """Maximum delay before a launched server is restarted, at least ``restart_seconds``.
    Measured by ``benchmarks/exactly_once.py``."""

    control_timeout_seconds: Annotated[float, above(0)] = 30.0
    """Maximum duration of one control request to a server, such as pausing it or reading its
    version."""


@dataclass
class WeightSync:
    """``[weight_sync]``: how weights are sent from the trainer to the servers."""

    transport: Literal["auto", "nccl", "host", "disk"] = "auto"
    """How weights are sent to the servers. ``nccl`` broadcasts from the GPUs of the source ranks.
    ``host`` sends from host memory over gloo; it uses neither NCCL nor the multiprocessors of a
    GPU, and works between any versions of torch. ``disk`` writes safetensors files to
    ``disk_path``, for servers that share a file system with the trainer. ``auto`` compares both
    ends when a server joins: it uses ``nccl`` if their NCCL versions and settings agree and they
    have different GPUs, and otherwise ``host``, with a warning that states the reason."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type in which weights are sent. ``auto`` uses ``training.mixed_precision_param``, the
    data type of the trainer's forward pass."""

    bucket_bytes: Annotated[int, at_least(1)] = 256 * 1024 * 1024
    """Approximate size of the buckets in which tensors are sent. A single tensor is never
    split. Servers reserve memory for one or two buckets. Over NCCL, each source rank also
    reserves one bucket for each server on its GPU. Measured by
    ``benchmarks/push_exactness.py``."""

    max_sources: Annotated[int, at_least(1).or_value(0, "all ranks")] = 8
    """Maximum number of ranks that send to each server at the same time, each approximately the
    same number of bytes. Each source rank has a connection to each server, so a higher number does
    not help in a cluster of hundreds of ranks. With pipeline parallelism, each pipeline rank has at
    least one source."""

    master_address: str = "auto"
    """Address at which servers reach rank 0. ``auto`` uses the address of this host on the route to
    each server, which is 127.0.0.1 for a server on the same machine."""

    timeout_seconds: Annotated[float, above(0)] = 120.0
    """Maximum time for each of the following: connecting to a server, sending one bucket, and
    computing the log-probabilities of an attestation on either side."""

    push_timeout_seconds: Annotated[float, above(0)] = 600.0
    """Maximum duration of one push to one server. A server that takes longer is disconnected, and
    the trainer then reconnects to it."""

    retry_seconds: Annotated[float, above(0)] = 1.0
    """Delay before the trainer reconnects to a lost server. It doubles with each failure in a
    row. Measured by ``benchmarks/torn_free.py``."""

    max_retry_seconds: Annotated[float, above(0)] = 10.0
    """Maximum of the delay that starts at ``retry_seconds``. Measured by
    ``benchmarks/torn_free.py``."""

    disk_path: str | None = None
    """Experimental: Directory for ``transport = "disk"``, with the same path on all hosts. The
    run creates it if necessary and keeps only the newest versions in it. It must not be shared
    with another run."""

    max_versions: Annotated[int, at_least(2).or_value(0, "the number of servers plus two")] = 0
    """Maximum number of versions of the whole model that may exist at once on the source ranks: the
    newest version, the one that is being gathered, and those that are still being sent to slow
    servers. All are in host memory, and allocated at the start. If it is less than the number of servers plus two, several slow servers together can
    delay the others."""

    checksum: bool = False
    """Compare a checksum of each tensor on the server with the trainer's. Only supported by
    embedded and vLLM servers. Measured by ``benchmarks/torn_free.py``."""

    attest_every: Annotated[int, at_least(1).or_value(0, "never")] = 200
    """Every version that is a multiple of this number is attested: the server computes
    log-probabilities of fixed tokens, which must equal the trainer's. An embedded server whose dtype
    is that of the push also computes checksums of the tensors that it serves, which must equal those
    of the tensors that were sent. For all other versions, only the version number that the server
    reports is compared."""

    delta: bool = False
    """Send only the elements that have changed since the version that a server has confirmed.
    The result is exact. This is worthwhile if the network is slower than memory. Only supported
    by embedded and vLLM servers. Measured by ``benchmarks/weight_delta.py``."""
