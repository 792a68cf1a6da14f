# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The summary of a run."""

import json

import pytest

from torchtitan.grpo.observe.summary import mean_over, write_summary


def test_the_summary_is_written_and_means_skip_records_without_the_key(tmp_path):
    history = [{"step": step, "reward/mean": step / 10} for step in range(1, 13)]
    assert mean_over(history[-10:], "reward/mean") == pytest.approx(0.75)
    assert mean_over(history, "no/such") is None
    assert json.loads(write_summary(tmp_path, {"steps": 12}).read_text()) == {"steps": 12}
