# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What reaches the console of what upstream logs."""

import dataclasses
import json
import logging

import pytest

from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.observe.console import init_console


@pytest.mark.parametrize(
    ("message", "is_shown"),
    [
        # As upstream's Trainer formats it.
        (f"Building grpo hf with {json.dumps(dataclasses.asdict(DecoderArgs()), indent=2)}", False),
        (f"Building a bwith {json.dumps({'dim': 1}, indent=2)}", False),
        ("Error running lspci: no such file", False),
        ("Model grpo hf size: 471,104 total parameters", True),
        ("Building device mesh with parallelism: pp=1, dp_replicate=1", True),
        ("Training with {rows} rows", True),
    ],
)
def test_what_every_run_would_print_is_left_out(message, is_shown, capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    init_console("info", is_rank_zero=True)
    root.info(message)
    assert (message in capsys.readouterr().out) is is_shown
