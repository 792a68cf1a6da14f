# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The checks themselves, as far as a CPU can run them, in processes of their own."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from check_gpu import decode, parity
from check_gpu.row import Row, Settings
from check_gpu.table import CHECKS

from torchtitan.grpo.inference.embedded.decode_graph import Compute
from torchtitan.grpo.losses.policy_terms import BUILTIN
from torchtitan.grpo.models.packed_attention import PackedAttentionKind

BENCHMARKS = Path(parity.__file__).resolve().parents[1]
ENDED = ("passed", "measured", "skipped")


@pytest.fixture
def rows_of(fork_server, rank_environment, tmp_path):
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


@pytest.mark.parametrize(
    ("name", "cases", "positive", "zero"),
    [
        ("machine", 3, ["tflops_of_256"], []),
        pytest.param(  # compiles for half a minute
            *("flex", len(get_args(PackedAttentionKind)), ["first_pass_seconds"], []),
            marks=pytest.mark.long,
        ),
        ("train-0.6b", 2, ["body_ms", "head_ms", "optimizer_ms", "tokens_per_second"], []),
        ("boundary", 1, ["publish_host_ms", "slot_gib", "tensors"], []),
        ("isolation", 3, ["steps", "p99_ms"], []),
        ("allocator", 1, ["snapshot_bytes"], ["differing_bytes"]),
        ("output-layer", 3, ["milliseconds"], []),
        ("streams", 3, ["bytes"], ["new_watchdogs"]),
    ],
)
def test_each_check_measures_on_a_cpu_what_it_can(rows_of, name, cases, positive, zero):
    rows = rows_of(name)
    figures = [(key, n) for row in rows.values() for key, n in row.figures.items()]
    assert len(rows) == cases
    assert all(row.reason for row in rows.values() if row.status == "skipped")
    assert {*positive, *zero} <= {key for key, _ in figures}
    assert all(n > 0 for key, n in figures if key in positive)
    assert all(n == 0 for key, n in figures if key in zero)


def test_log_probabilities_attention_and_losses_are_compared_with_float64(rows_of):
    rows = rows_of("parity")
    names = {f"loss {name}" for name in BUILTIN}
    assert names <= rows.keys() and "sdpa attention, 64 tokens" in rows
    logprobs = next(row for case, row in rows.items() if case.startswith("log-probabilities"))
    names = {"logprob_nats", "entropy_nats", "hidden_gradient", "weight_gradient"}
    assert logprobs.figures.keys() == names
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


@pytest.mark.long  # lost servers in whole runs are the subject of other tests
def test_a_real_run_survives_its_servers(rows_of):
    stopped, killed = rows_of("end-to-end").values()
    assert stopped.figures["steps"] > 0
    assert killed.status == "passed" and killed.figures["exit_status"] == 143


def test_graphs_are_compared_and_each_way_of_decoding_is_timed(tmp_path: Path) -> None:
    compared, single, graphs, pushed = decode.run(Settings("decode", "cpu", tmp_path))
    assert compared.status == "passed"
    assert compared.figures["equal_part"] == 1 and compared.figures["logprob_error"] < 1e-4
    for row in (single, graphs):
        assert row.status == "measured"
        assert row.figures["steps"] == 9 and row.figures["tokens_per_second"] > 0
    assert pushed.status == "skipped"


def test_graphs_that_compute_something_else_fail(tmp_path, monkeypatch):
    def wrong(compute: Compute, _: bool) -> Compute:
        return lambda: torch.zeros_like(compute())

    monkeypatch.setattr(decode, "_repeat", wrong)
    compared: Any = next(iter(decode.run(Settings("decode", "cpu", tmp_path))))
    assert compared.status == "failed"
