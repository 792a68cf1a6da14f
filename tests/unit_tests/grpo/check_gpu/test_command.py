# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The command, its table and JSON line, and checks that fail, hang, or crash, on a CPU."""

import json
import sys
from pathlib import Path

import pytest

from torchtitan.grpo import cli
from torchtitan.grpo.check_gpu import command, owner
from torchtitan.grpo.check_gpu.table import CHECKS, Check

# How checks end, each as the body of a module.
ENDINGS = {
    "fine": "    yield Row('one', 'passed', {'widgets': 3.0}, 'three widgets')",
    "wrong": "    yield Row('one', 'failed', reason='two widgets')",
    "raising": "    yield Row('one', 'passed')\n    raise ValueError('no such widget')",
    "crashing": "    yield Row('one', 'passed')\n    os.kill(os.getpid(), 11)",
    "hanging": "    yield Row('one', 'passed')\n    time.sleep(600)",
    "silent": "    yield from ()",
}


@pytest.fixture
def make_check(tmp_path, monkeypatch):
    """Makes a check that ends in one of the ways above."""
    # The children import what lies in the folder in which they start.
    monkeypatch.chdir(tmp_path)
    opening = "import os\nimport time\nfrom torchtitan.grpo.check_gpu.row import Row\n"

    def make(ending: str, limit_seconds: float = 300.0) -> Check:
        body = f"{opening}\n\ndef run(settings):\n{ENDINGS[ending]}\n"
        Path(tmp_path, f"check_that_is_{ending}.py").write_text(body)
        return Check(ending, f"check_that_is_{ending}", limit_seconds, "Is it?")

    return make


def test_rows_that_pass_end_in_status_0_and_a_json_line(make_check, capsys):
    assert command.main(["--device", "cpu"], [make_check("fine")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("passed    fine: one  widgets 3 [three widgets]") for line in lines
    ), lines
    result = json.loads(lines[-1])
    assert result["ok"] and result["device"] == "cpu"
    assert result["machine"].keys() >= {"torch", "cuda", "nccl", "driver", "gpus", "commit"}
    assert "no GPU" in result["note"]
    assert result["rows"][0]["figures"] == {"widgets": 3.0}


def test_a_check_that_fails_spoils_no_other(make_check, capsys):
    checks = [make_check("wrong"), make_check("raising"), make_check("fine")]
    assert command.main(["--device", "cpu"], checks) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not result["ok"]
    found = [(row["check"], row["status"]) for row in result["rows"]]
    assert found == [
        ("wrong", "failed"), ("raising", "passed"), ("raising", "failed"), ("fine", "passed"),
    ]  # fmt: skip
    assert "no such widget" in result["rows"][2]["reason"]


@pytest.mark.parametrize(
    ("ending", "limit", "reason"),
    [("crashing", 300.0, "signal 11"), ("hanging", 8.0, "must end within 8 s")],
)
def test_rows_before_a_crash_or_a_hang_are_kept(make_check, ending: str, limit: float, reason: str):
    rows = owner.run_check(make_check(ending, limit), "cpu")
    assert rows[-1].status == "failed" and reason in rows[-1].reason
    assert rows[-1].check == ending
    if ending == "crashing":
        assert [row.status for row in rows] == ["passed", "failed"]


def test_a_check_without_rows_has_failed(make_check):
    (row,) = owner.run_check(make_check("silent"), "cpu")
    assert row.status == "failed" and "at least one row" in row.reason


def test_only_what_is_named_runs(make_check, capsys):
    checks = [make_check("wrong"), make_check("fine")]
    assert command.main(["--device", "cpu", "--only", "fine"], checks) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["check"] for row in result["rows"]] == ["fine"]


def test_the_checks_are_listed_and_end_within_twenty_minutes(capsys):
    assert cli.run(["check-gpu", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(check.name in out and check.question in out for check in CHECKS)
    assert sum(check.limit_seconds for check in CHECKS) <= 20 * 60


def test_a_machine_without_a_gpu_gets_one_message(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.run(["check-gpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: check-gpu needs a GPU")
    assert len(captured.err.splitlines()) == 1


def test_a_check_that_needs_a_gpu_is_skipped_on_a_cpu(capsys):
    assert cli.run(["check-gpu", "--device", "cpu", "--only", "flex", "--only", "nccl"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["status"] for row in result["rows"]] == ["skipped", "skipped"]


def test_nothing_imports_the_checks_before_they_run():
    imported = {name for name in sys.modules if name.startswith("torchtitan.grpo.check_gpu.")}
    assert not imported & {check.module for check in CHECKS}
