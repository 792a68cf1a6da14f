# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A recorder for each test; see `recorder.py`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorder import Recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    with made.recording():
        yield made
