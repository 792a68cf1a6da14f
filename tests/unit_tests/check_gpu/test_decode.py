# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The check of decoding, with tiny sizes on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from check_gpu import decode
from check_gpu.row import Settings

from torchtitan.grpo.inference.embedded.decode_graph import Compute


def test_graphs_are_compared_and_each_way_of_decoding_is_timed(tmp_path: Path) -> None:
    compared, single, graphs, pushed = decode.run(Settings("decode", "cpu", tmp_path))
    assert compared.status == "passed"
    assert compared.figures["equal_part"] == 1 and compared.figures["logprob_error"] < 1e-4
    for row in (single, graphs):
        assert row.status == "measured"
        assert row.figures["steps"] == 9 and row.figures["tokens_per_second"] > 0
    assert pushed.status == "skipped"


def test_graphs_that_compute_something_else_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(compute: Compute, _: bool) -> Compute:
        return lambda: torch.zeros_like(compute())

    monkeypatch.setattr(decode, "_repeat", wrong)
    compared: Any = next(iter(decode.run(Settings("decode", "cpu", tmp_path))))
    assert compared.status == "failed"
