# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The kinds of real servers, and the interpreters that run them."""

import os
from pathlib import Path

import pytest

from torchtitan.grpo.inference.local_servers import HeldPorts

REAL = ("vllm", "sglang")
LONG = [pytest.param(k, marks=[getattr(pytest.mark, k), pytest.mark.long]) for k in REAL]


def python_of(kind: str) -> str:
    """Returns the interpreter of a server's environment; fails the test if there is none."""
    default = Path(__file__).resolve().parents[2] / f".venv-{kind}/bin/python"
    python = os.environ.get(f"TORCHTITAN_GRPO_{kind.upper()}_PYTHON", str(default))
    if not Path(python).exists():
        pytest.fail(f"{python} is not there: run scripts/install_{kind}.sh first.")
    return python


_held: list[HeldPorts] = []


def held_port() -> int:
    """Returns a port for a server, which no other connection is given while this process lives."""
    _held.append(HeldPorts(1))
    return _held[-1].ports[0]
