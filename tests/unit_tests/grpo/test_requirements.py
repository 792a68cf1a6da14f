# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The lock files hold every package that the scripts install, each with its hashes."""

import re
import tomllib
from pathlib import Path

import pytest

PINNED = re.compile(r"^([a-z0-9-]+)==([^ ;\\]+)", re.MULTILINE)
FILES = ("trainer", "torch", "torch-cpu", "vllm", "vllm-cpu", "sglang", "sglang-cpu")


def read(repository: Path, name: str) -> str:
    return (repository / "requirements" / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", FILES)
def test_every_package_has_a_version_and_a_hash(repository: Path, name: str):
    blocks = re.split(r"\n(?=[a-z0-9])", "\n" + read(repository, name))[1:]
    assert blocks
    for block in blocks:
        assert PINNED.match(block), block[:80]
        assert "--hash=sha256:" in block, block[:80]


def test_the_trainers_packages_are_those_of_the_project(repository: Path):
    """A requirement that is added to pyproject.toml must be locked as well."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in wanted}  # pyright: ignore[reportOptionalSubscript]
    locked = {n for file in ("trainer", "torch") for n, _ in PINNED.findall(read(repository, file))}
    # A requirement of Python 3.10, which the project does not support.
    assert names - {"tomli"} <= locked


def test_versions_are_those_that_the_scripts_name(repository: Path):
    text = (repository / "scripts/_env.sh").read_text()
    versions = dict(re.findall(r"^(\w+)_VERSION=(\S+)$", text, re.MULTILINE))
    for file, package, variable in (
        ("torch", "torch", "TORCH"), ("vllm", "vllm", "VLLM"), ("vllm-cpu", "vllm-cpu", "VLLM"),
        ("sglang", "sglang", "SGLANG"), ("sglang-cpu", "sglang", "SGLANG"),
        ("sglang-cpu", "torchvision", "TORCHVISION"),
    ):  # fmt: skip
        assert dict(PINNED.findall(read(repository, file)))[package] == versions[variable], file
    cpu = dict(PINNED.findall(read(repository, "torch-cpu")))
    assert cpu["torch"] == versions["TORCH"] + "+cpu"


def test_servers_without_a_gpu_get_no_cuda_packages(repository: Path):
    for name in ("trainer", "vllm-cpu", "sglang-cpu"):
        found = [n for n, _ in PINNED.findall(read(repository, name))]
        assert not [n for n in found if n == "torch" or n.startswith(("nvidia-", "cuda-"))], name
