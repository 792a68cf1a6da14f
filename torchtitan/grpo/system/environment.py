# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes the environment of launched servers and the rollout process, without a rank's variables and keys.

All other variables are passed on: those that clusters set for modules, caches, networks and schedulers
are too many to list.
"""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

RUN_VARIABLE = "TORCHTITAN_GRPO_RUN"
"""Its value names the rollout process that started a process, even one that left session and parents."""

# torchrun describes a rank in them. A child that is no rank would take them for its own.
_OF_RANK = re.compile(r"(LOCAL_)?(RANK|WORLD_SIZE)$|(TORCHELASTIC|GROUP|ROLE|MASTER)_")
_OF_SERVICE = re.compile(r"(WANDB|AWS|AZURE|GOOGLE|CLOUDSDK)_|SSH_AUTH_SOCK$")
_NAME_OF_KEY = re.compile(
    # At the end, because programs have settings such as VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD.
    r"(KEYS?|TOKEN|JWT|DSN|(^|_)(PAT|PASS|AUTH)|_PWD)(_?(ID|FILE|PATH|JSON|BASE64|B64|\d+))?$"
    r"|SECRET|PASSW|PASSPHRASE|CREDENTIAL|CREDS|WEBHOOK",
    re.IGNORECASE,
)
_VALUE_WITH_KEY = re.compile(r"://[^/\s]*@|PRIVATE KEY-----")
_PROXY = re.compile(r"_proxy$", re.IGNORECASE)  # needed, even if the address holds a password


def without_keys(environ: Mapping[str, str], own: Collection[str] = ()) -> dict[str, str]:
    """Returns a child's variables, without a rank's and those that may hold keys. Keeps patterns in ``own``."""
    return {
        name: value
        for name, value in environ.items()
        if is_named(name, own) or not (_OF_RANK.match(name) or _holds_key(name, value))
    }


def is_named(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _holds_key(name: str, value: str) -> bool:
    if _OF_SERVICE.match(name) or _NAME_OF_KEY.search(name):
        return True
    return _VALUE_WITH_KEY.search(value) is not None and not _PROXY.search(name)
