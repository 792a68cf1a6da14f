# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""wandb without a network, and TensorBoard: both are given each step's metrics and samples."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchtitan.components.metrics import LoggerContainer, TensorBoardLogger, WandBLogger

from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.observe.trackers import COLUMNS, log_samples, without_pipeline

SAMPLE = {
    "step": 1, "group_id": 7, "prompt": "12->", "completion": "21", "reward": 0.5,
    "advantage": None, "reward_components": {"exact_match": 0.5}, "columns": {"answer": "21"},
    "finish_reason": "stop", "versions": [[0, 0, 3]],
    "context": [
        {"role": "prompt", "trained": False, "num_tokens": 4, "text": "12->"},
        {"role": "model", "trained": True, "num_tokens": 3, "text": "21<eos>"},
    ],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_samples_are_a_table_in_wandb(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    container = LoggerContainer()
    container.add_logger(WandBLogger(str(tmp_path), JobConfig()))
    try:
        container.log({"reward/mean": 0.5}, 1)
        log_samples(container, [SAMPLE], 1)
    finally:
        container.close()
    (file,) = tmp_path.rglob("*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(COLUMNS)
    row = dict(zip(COLUMNS, table["data"][0], strict=True))
    assert row["context"] == "[prompt] 12->\n[model, trained] 21<eos>"
    assert (row["reward"], row["columns"]) == (0.5, '{"answer": "21"}')


def test_samples_are_text_in_tensorboard(tmp_path: Path):
    tracker = TensorBoardLogger(str(tmp_path))
    tracker.log({"reward/mean": 0.5}, 1)
    log_samples(tracker, [SAMPLE], 1)
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    (tag,) = events.Tags()["tensors"]
    text = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert "[model, 3 tokens, trained]" in text


def test_rank_zero_has_the_loggers_of_a_pipelined_run():
    """Upstream asks ``pp_enabled`` and then chooses the rank of the last stage."""

    class Dims(SimpleNamespace):
        @property
        def pp_enabled(self) -> bool:
            return self.pp > 1

    dims = Dims(pp=2, world_size=4)
    assert not without_pipeline(dims).pp_enabled  # pyright: ignore[reportArgumentType]
    assert dims.pp == 2
