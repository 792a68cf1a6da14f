# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A copy of the shipped model, which tests of weight files change."""

import shutil
from pathlib import Path

import pytest
from model_folders import WEIGHTS, Tensors
from safetensors.torch import load_file


@pytest.fixture
def folder(tmp_path: Path, repository: Path) -> Path:
    return Path(shutil.copytree(repository / "assets/reverse_digits/model", tmp_path / "model"))


@pytest.fixture
def tensors(folder: Path) -> Tensors:
    return load_file(folder / WEIGHTS)
