# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which environment variables the child processes of a run see.

The environment of a trainer holds keys: of wandb, of the Hub, of a cloud, of servers and monitors. A child
sees what it needs to run, and no key that is not its own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

RUN_VARIABLE = "TORCHTITAN_GRPO_RUN"
"""Tells to which rollout process a process belongs, also if it has left its session and its parents."""

# Everything that a program needs to run and to find files, and nothing that grants access.
PROGRAM = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "PWD",
        "TMPDIR",
        "TZ",
        "LANG",
        "LANGUAGE",
        "LC_*",
    ),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"),
    *("PYTHONWARNINGS", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME"),
    *("*_NUM_THREADS", "TOKENIZERS_PARALLELISM", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"),
    *("TRANSFORMERS_OFFLINE", "NLTK_DATA", RUN_VARIABLE),
)
# What libraries for computing and for networks between GPUs read besides.
_COMPUTING = (
    *("CUDA_*", "CUDNN_*", "CUBLAS_*", "NVIDIA_*", "NVTE_*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*"),
    *("HIP_*", "HSA_*", "ROCM_*", "ROCR_*", "RCCL_*", "MIOPEN_*", "GPU_*", "TORCH_*", "PYTORCH_*"),
    *("TORCHINDUCTOR_*", "TORCHDYNAMO_*", "TRITON_*", "FLASHINFER_*", "FLASH_*", "DG_*", "XLA_*"),
    *("VLLM_*", "SGLANG_*", "SGL_*", "RAY_*", "OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*"),
    *("PYTHON*", "MALLOC_*", "GLIBC_*", "LD_*", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "MAX_JOBS", "TMP", "TEMP", "TERM", "HOSTNAME"),
    *("HF_*", "TRANSFORMERS_*", "SAFETENSORS_*", "TOKENIZERS_*", "ASAN_*", "COVERAGE_*"),
)
# The Hub and data sets may be reached through a proxy, whose address may hold a password.
_NETWORK = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_HUB_KEYS = ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN")
_GRANTS_ACCESS = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|TOKEN_PATH|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)"
)


def passed(environ: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Returns the variables that match a pattern: a name, or one that begins or ends with ``*``."""
    wanted = tuple(patterns)
    return {
        name: value for name, value in environ.items() if any(_matches(name, p) for p in wanted)
    }


def rollout_environment(
    environ: Mapping[str, str], pass_variables: Sequence[str], *, uses_hub: bool
) -> dict[str, str]:
    """Returns the environment of a rollout process.

    Args:
        environ: Environment of the process that starts it.
        pass_variables: Its own keys, and ``workers.pass_variables``, which it passes on.
        uses_hub: Whether it reads data sets from the Hub, which needs the user's key.
    """
    keys = _HUB_KEYS if uses_hub else ()
    named = passed(environ, (*PROGRAM, *_NETWORK, *pass_variables, *keys))
    return _for_computing(environ) | named


def server_environment(environ: Mapping[str, str], own_keys: Sequence[str]) -> dict[str, str]:
    """Returns the environment of an inference server, which reads its model from a directory.

    Args:
        environ: Environment of the process that starts it.
        own_keys: Variables of the keys that it asks for.
    """
    return _for_computing(environ) | passed(environ, (*PROGRAM, *own_keys))


def _for_computing(environ: Mapping[str, str]) -> dict[str, str]:
    found = passed(environ, _COMPUTING)
    return {name: value for name, value in found.items() if not _GRANTS_ACCESS.search(name)}


def _matches(name: str, pattern: str) -> bool:
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    return name.endswith(pattern[1:]) if pattern.startswith("*") else name == pattern
