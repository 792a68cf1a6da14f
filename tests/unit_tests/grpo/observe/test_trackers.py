# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""wandb without a network, and TensorBoard: both are given each step's metrics and samples."""

import json
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.observe.trackers import (
    COLUMNS,
    log_samples,
    open_trackers,
    wandb_place,
    wandb_run,
)
from torchtitan.grpo.run_folder.replacing import move_aside
from torchtitan.grpo.upstream.metrics import (
    TensorBoardLogger,
    WandbConfig,
    WandBLogger,
)

SAMPLE = {
    "step": 1, "group_id": 7, "prompt": "12->", "completion": "21", "reward": 0.5,
    "advantage": None, "unscored": "", "left_out": False, "reward_components": {"exact_match": 0.5}, "columns": {"answer": "21"},
    "finish_reason": "stop", "versions": [[0, 0, 3]], "logged": {"verdict": "right"},
    "context": [
        {"role": "prompt", "trained": False, "num_tokens": 4, "text": "12->"},
        {"role": "model", "trained": True, "num_tokens": 3, "text": "21<eos>"},
    ],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_samples_are_a_table_in_wandb(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WandBLogger(str(tmp_path), WandbConfig())
    try:
        tracker.log({"reward/mean": 0.5}, 1)
        log_samples([tracker], [SAMPLE], 1)
    finally:
        tracker.close()
    (file,) = tmp_path.rglob("*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(COLUMNS)
    row = dict(zip(COLUMNS, table["data"][0], strict=True))
    assert row["context"] == "[prompt] 12->\n[model, trained] 21<eos>"
    assert (row["reward"], row["columns"]) == (0.5, '{"answer": "21"}')


@pytest.fixture
def wandb_config(tmp_path: Path, monkeypatch) -> JobConfig:
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    config = JobConfig()
    config.job.dump_folder = str(tmp_path / "run")
    config.metrics.enable_wandb = True
    return config


def opened(config: JobConfig, start: int = 1) -> tuple[str, str, str]:
    """Opens wandb as a start of the run does; returns its id, how it resumes, and where it is."""
    folder = Path(config.job.dump_folder) / config.metrics.save_tb_folder / f"20260101-000{start}"
    with wandb_run(config):
        resume = os.environ["WANDB_RESUME"]
        tracker = WandBLogger(str(folder), WandbConfig(config.to_dict()))  # pyright: ignore
    try:
        place = wandb_place([tracker])
        assert place is not None
        return tracker.wandb.run.id, resume, place
    finally:
        tracker.close()


@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_a_run_has_one_id_in_wandb_until_it_is_removed(wandb_config: JobConfig):
    folder = Path(wandb_config.job.dump_folder)
    first, resume, place = opened(wandb_config)
    assert resume == "allow"
    assert place.startswith(f"wandb's files are in {folder}/tb/20260101-0001/wandb/offline-run-")
    assert f"-{first}: upload them with `wandb sync {folder}" in place
    assert opened(wandb_config, 2)[0] == first
    # User code that uses wandb must not write into the run.
    assert "WANDB_RUN_ID" not in os.environ and "WANDB_RESUME" not in os.environ
    aside = move_aside(wandb_config, keep=True)
    assert list(folder.iterdir()) == [aside]
    with wandb_run(wandb_config):
        assert os.environ["WANDB_RUN_ID"] != first


@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_a_file_without_an_id_is_replaced(wandb_config: JobConfig):
    file = Path(wandb_config.job.dump_folder) / "wandb_id_rank0"
    file.parent.mkdir()
    for damage in ("", " \n"):
        file.write_text(damage)
        with wandb_run(wandb_config):
            made = os.environ["WANDB_RUN_ID"]
        assert made == file.read_text().strip() != ""


def test_what_the_environment_names_is_left_to_it(wandb_config: JobConfig, monkeypatch):
    for name in ("WANDB_RUN_ID", "WANDB_RESUME_FROM", "WANDB_FORK_FROM"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "mine")
            with wandb_run(wandb_config):
                assert os.environ[name] == "mine" and "WANDB_RESUME" not in os.environ
    assert not Path(wandb_config.job.dump_folder).exists()


def test_samples_are_text_in_tensorboard(tmp_path: Path):
    tracker = TensorBoardLogger(str(tmp_path))
    tracker.log({"reward/mean": 0.5}, 1)
    log_samples([tracker], [SAMPLE], 1)
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    (tag,) = events.Tags()["tensors"]
    text = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert "[model, 3 tokens, trained]" in text


def test_rank_zero_alone_opens_trackers(wandb_config: JobConfig, monkeypatch):
    wandb_config.metrics.enable_tensorboard = True
    wandb_config.metrics.enable_wandb = False
    opened_by_rank = []
    for rank in (0, 1):
        monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)  # noqa: B023
        trackers = open_trackers(wandb_config)
        opened_by_rank.append(len(trackers))
        for tracker in trackers:
            tracker.close()
    assert opened_by_rank == [1, 0]
