# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a worker process sees of the trainer's environment, and how much it may use.

User code must not come upon the trainer's keys by accident, such as in a log of ``os.environ``. This is
no sandbox: a worker runs as the same user, who can read that user's files and processes.
"""

import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan.grpo.system.child import die_with_parent
from torchtitan.grpo.system.environment import RUN_VARIABLE, is_named

# Everything that a program needs to run and to find files, and nothing that grants access.
_PASSED = (
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


@dataclass(frozen=True)
class Surroundings:
    """Environment variables and limits of worker processes.

    Attributes:
        pass_variables: ``workers.pass_variables``.
        max_memory_gib: ``workers.max_memory_gib``; 0 is no limit.
        max_cpu_seconds: ``workers.max_cpu_seconds``; 0 is no limit.
    """

    pass_variables: Sequence[str] = ()
    max_memory_gib: float = 0.0
    max_cpu_seconds: int = 0

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that a worker sees."""
        names = *_PASSED, *self.pass_variables
        return {name: value for name, value in environ.items() if is_named(name, names)}

    def enter(self) -> None:
        """Applies the limits. Called in the child, between fork and exec."""
        die_with_parent(signal.SIGKILL)
        if self.max_memory_gib:
            num_bytes = int(self.max_memory_gib * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        if self.max_cpu_seconds:
            # The kernel sends SIGXCPU at the first limit, and SIGKILL at the second.
            limits = self.max_cpu_seconds, self.max_cpu_seconds + 1
            resource.setrlimit(resource.RLIMIT_CPU, limits)
