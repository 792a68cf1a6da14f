# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests requests to leave groups while another operation of the updater is under way."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan.grpo.inference.embedded.updates import WeightUpdater
from torchtitan.grpo.weight_wire.staging import UpdateError


def test_leaving_waits_for_what_it_breaks_off_and_anything_else_does_not():
    table: Any = SimpleNamespace(in_wire_dtype=None, prepared=None, check=None, stream=None)
    engine: Any = None
    updater = WeightUpdater(engine, table, torch.device("cpu"), 60.0, "")
    end = threading.Timer(0.2, updater._busy.release)
    group: Any = SimpleNamespace(begin_leave=lambda: end.start())
    updater._session._groups["one"] = group
    # A bucket that is awaited in that group; it fails a little after the group was left.
    assert updater._busy.acquire(blocking=False)
    with pytest.raises(UpdateError, match="under way"):
        updater.begin()
    updater.leave_all()
    assert updater.group_names == []
    updater.begin()
