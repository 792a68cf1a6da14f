# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[inference]`` table: the servers that generate rollouts."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Inference:
    """``[inference]``: the servers that write rollouts."""

    kind: str = "embedded"
    """Kind of the servers: ``embedded`` (this project's own small server, which needs nothing
    else installed), ``sglang`` or ``vllm``. Each is a row of ``inference/kinds.py``."""

    urls: list[str] = field(default_factory=list)
    """Base URLs of running servers, ``http://host:port``. Required unless ``launch`` or
    ``urls_file``."""

    urls_file: str | None = None
    """File with one base URL a line, in place of ``urls``; lines that begin with # are
    passed over. Read again when it changes, and when rank 0 is sent SIGHUP: servers that
    are new in it join the run, servers that are no longer in it leave it. A file that names
    no servers, or is no list of URLs, changes nothing. SIGHUP goes to the process that the
    log names at the start, not to torchrun, which would end the run. A run whose servers are
    all on this machine at the start uses its loopback alone for gloo; set
    ``GLOO_SOCKET_IFNAME`` where others are to join it."""

    launch: bool = False
    """Start ``num_servers`` servers on this machine, on free ports, and end them with the
    run. Not together with ``urls``."""

    num_servers: int = 1
    """Servers to launch, at least 1."""

    python: str | None = None
    """Python interpreter of the servers' environment, used with ``launch``. None is this
    interpreter, which suits the embedded server. vLLM and SGLang want environments of
    their own, see scripts/install_vllm.sh and scripts/install_sglang.sh."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of launched servers. ``auto``: CUDA where there is a GPU."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights' dtype in launched servers. ``auto``: float32 on CPU, bfloat16 on CUDA."""

    max_model_len: int = 0
    """Longest sequence of launched servers, at least the longest prompt with
    ``rollout.max_new_tokens``; 0 is ``training.seq_len``."""

    extra_args: list[str] = field(default_factory=list)
    """Further command line arguments of launched servers, passed as they are. Each server
    is also given a sampling seed: ``debug.seed`` plus its index."""

    api_key: str | None = None
    """Key for generation routes. None reads the environment variable
    ``TORCHTITAN_GRPO_API_KEY``."""

    admin_key: str | None = None
    """Key for control routes (SGLang's ``--admin-api-key``). None reads
    ``TORCHTITAN_GRPO_ADMIN_KEY``."""

    startup_timeout_seconds: float = 300.0
    """Longest time until a server, launched or not, answers that it is up."""

    max_restarts: int = 3
    """How often each launched server that ends is started again; 0 is never."""

    restart_seconds: float = 5.0
    """Pause before a launched server is started again; it doubles with each restart."""

    control_timeout_seconds: float = 30.0
    """Bound of one control request, such as pause or version."""
