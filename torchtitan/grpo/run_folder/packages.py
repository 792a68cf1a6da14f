# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The installed packages that a run depends on."""

from importlib import metadata

_PACKAGES = (
    *("torchtitan-grpo", "torch", "torchtitan", "transformers", "tokenizers", "safetensors"),
    *("huggingface_hub", "datasets", "numpy", "pyzmq", "vllm", "sglang"),
)


def package_versions() -> dict[str, str]:
    """Returns the versions of those packages that are installed, by name."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
