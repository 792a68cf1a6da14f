# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The checks themselves, as far as a CPU can run them, in processes of their own."""

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from check_gpu import end_to_end, nccl, parity, streams
from check_gpu.parts import device_of
from check_gpu.row import Row, Settings
from check_gpu.table import CHECKS

from torchtitan.grpo.losses.policy_terms import BUILTIN
from torchtitan.grpo.models.packed_attention import PackedAttentionKind
from torchtitan.grpo.weight_wire import device_lanes

BENCHMARKS = Path(parity.__file__).resolve().parents[1]
ENDED = ("passed", "measured", "skipped")


@pytest.fixture
def rows_of(fork_server, rank_environment, tmp_path):
    """Runs a check, and returns its rows by their cases."""

    def run(name: str) -> dict[str, Row]:
        (check,) = (check for check in CHECKS if check.name == name)
        (tmp_path / "work").mkdir()
        task = {
            "check": name, "module": check.module, "device": "cpu", "cannot_tell": check.cannot_tell,
            "folder": str(tmp_path / "work"), "rows": str(tmp_path / "rows.jsonl"),
        }  # fmt: skip
        log = tmp_path / "log"
        with log.open("w") as output:
            process = fork_server.start(
                "check_gpu.child", [json.dumps(task)],
                environment=rank_environment | {"PYTHONPATH": str(BENCHMARKS)}, output=output,
            )  # fmt: skip
        assert process.wait(300) == 0, log.read_text()[-8000:]
        lines = (tmp_path / "rows.jsonl").read_text().splitlines()
        rows = [Row(**json.loads(line)) for line in lines]
        assert all(row.status in ENDED and row.check == name for row in rows), rows
        assert all(row.cannot_tell for row in rows)
        return {row.case: row for row in rows}

    return run


def test_the_machines_versions_are_named_and_its_ceilings_are_measured(rows_of):
    versions, products, copies = rows_of("machine").values()
    assert versions.facts["torch"] == torch.__version__ and int(versions.facts["cores"]) > 0
    assert products.figures["tflops_of_256"] > 0
    assert len(copies.figures) == 4 and min(copies.figures.values()) > 0


def test_each_kind_of_attention_is_compiled_or_said_not_to_run(rows_of):
    rows = rows_of("flex")
    assert list(rows) == list(get_args(PackedAttentionKind))
    assert rows["sdpa"].status == "passed" and rows["sdpa"].figures["first_pass_seconds"] > 0
    assert all(row.reason for row in rows.values() if row.status == "skipped")


def test_log_probabilities_attention_and_losses_are_compared_with_float64(rows_of):
    rows = rows_of("parity")
    names = {f"loss {name}" for name in BUILTIN}
    assert names <= rows.keys() and "sdpa attention, 64 tokens" in rows
    logprobs = next(row for case, row in rows.items() if case.startswith("log-probabilities"))
    assert logprobs.figures.keys() == {
        "logprob_nats", "entropy_nats", "hidden_gradient", "weight_gradient",
    }  # fmt: skip
    for row in rows.values():
        assert row.status == "skipped" or all(0 < e < 1e-4 for e in row.figures.values()), row


@pytest.mark.parametrize("wrong", ["entropy", "weight_gradient"])
def test_wrong_log_probabilities_are_noticed(wrong, monkeypatch, tmp_path):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, packed, weight):
            factors = [1.0, 1.01, 1.0, 1.0] if wrong == "entropy" else [1.0] * 4
            return packed * torch.tensor(factors)

        @staticmethod
        def backward(ctx, grad):
            return grad, torch.full((997, 32), 0.01) if wrong == "weight_gradient" else None

    real = parity.packed_linear_logprobs

    def changed(hidden, weight, *arguments, **settings):
        return Wrong.apply(real(hidden, weight, *arguments, **settings), weight)

    monkeypatch.setattr(parity, "packed_linear_logprobs", changed)
    settings = Settings("parity", "cpu", tmp_path)
    row = parity._logprobs(settings, 64, 997, 32, torch.float32)
    assert row.status == "failed" and row.reason.startswith("must hold")


def test_a_wrong_mask_of_attention_is_noticed(monkeypatch, tmp_path):
    seen = parity.AttentionCase.attend

    def over_borders(case, ids, *inputs):
        return seen(case, torch.zeros_like(ids), *inputs)

    monkeypatch.setattr(parity.AttentionCase, "attend", over_borders)
    assert parity._attention("sdpa", Settings("parity", "cpu", tmp_path)).status == "failed"


def test_a_wrong_loss_is_noticed(monkeypatch):
    real = parity.objective

    def off_on_one_side(inputs, config):
        loss, metrics = real(inputs, config)
        return loss * (1.001 if loss.dtype == torch.float32 else 1.0), metrics

    monkeypatch.setattr(parity, "objective", off_on_one_side)
    assert parity._loss("clip", torch.device("cpu")).status == "failed"


def test_joins_are_looked_at_for_watchdogs(rows_of):
    of_joins, threads, record = rows_of("streams").values()
    assert of_joins.status == "skipped"
    assert threads.status == "passed" and threads.figures["new_watchdogs"] == 0
    assert record.figures["bytes"] > 0
    assert "pt_tcpstore" in threads.facts["new"]


@pytest.mark.parametrize("are_own", [True, False])
def test_streams_that_are_torchs_are_noticed(are_own, monkeypatch):
    pool, own = itertools.cycle(range(32)), itertools.count(1000)

    def stream(handles) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=next(handles), query=lambda: True)

    snapshots = SimpleNamespace(_copies=SimpleNamespace(_stream=stream(own)))
    monkeypatch.setattr(streams, "make_pushed", lambda *_: SimpleNamespace(snapshots=snapshots))
    monkeypatch.setattr(device_lanes, "_lanes", {})
    monkeypatch.setattr(device_lanes, "new_stream", lambda device: stream(own if are_own else pool))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: stream(pool))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream(itertools.count(0)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    row = streams._streams(torch.device("cpu"))
    assert row.status == ("passed" if are_own else "failed")
    assert row.figures["streams"] == 8 and row.figures["equal_to_torchs"] == 8 * (not are_own)


def test_steps_of_the_real_model_are_split_into_parts(rows_of):
    steps, kernels = rows_of("train-0.6b").values()
    parts = [steps.figures[f"{part}_ms"] for part in ("body", "head", "optimizer")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(steps.figures["step_ms"], rel=0.5)
    assert steps.figures["tokens_per_second"] > 0 and steps.figures["gradient_norm"] > 0
    assert kernels.figures["kernels"] > 100


def test_publishing_is_measured_beside_steps(rows_of):
    (row,) = rows_of("boundary").values()
    assert row.figures["publish_host_ms"] > 0 and row.figures["slot_gib"] > 0
    assert row.figures["tensors"] == 24


def test_copies_files_and_deltas_run_beside_steps(rows_of):
    rows = rows_of("isolation")
    assert list(rows) == [
        "copies into pinned slots", "writing a version to disk", "encoding deltas",
    ]  # fmt: skip
    assert all(row.figures["steps"] >= 50 and row.figures["p99_ms"] > 0 for row in rows.values())


def test_snapshots_are_compared_byte_for_byte(rows_of):
    (row,) = rows_of("allocator").values()
    assert row.status == "passed"
    assert row.figures["differing_bytes"] == 0 and row.figures["snapshot_bytes"] > 0


def test_the_output_layer_is_measured_as_runs_use_it(rows_of):
    entropy, without, trained = rows_of("output-layer").values()
    assert "the default" in entropy.case and "without" in without.case and "8 other" in trained.case
    assert all(row.figures["milliseconds"] > 0 for row in (entropy, without, trained))


@pytest.mark.long  # lost servers in whole runs are the subject of other tests
def test_a_real_run_survives_its_servers(rows_of):
    stopped, killed = rows_of("end-to-end").values()
    assert stopped.figures["steps"] > 0
    assert killed.status == "passed" and killed.figures["exit_status"] == 143


def test_an_installed_package_says_that_a_whole_run_needs_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(end_to_end, "_CONFIG", tmp_path / "quickstart.toml")
    (row,) = end_to_end.run(Settings("end-to-end", "cpu", tmp_path))
    assert row.status == "skipped" and "install a checkout" in row.reason


def test_two_gpus_are_asked_for_where_one_cannot_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(nccl, "join_alone", lambda: None)
    monkeypatch.setattr(nccl, "_leave", lambda device, *, beside_kernel: Row("left", "passed"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    *_, row = nccl.run(Settings("nccl", "cuda", tmp_path))
    assert row.status == "two GPUs" and "another GPU" in row.reason


def test_the_gpu_has_an_index_without_which_torch_takes_no_device(tmp_path):
    assert device_of(Settings("streams", "cuda", tmp_path)) == torch.device("cuda", 0)
    assert device_of(Settings("streams", "cpu", tmp_path)) == torch.device("cpu")
