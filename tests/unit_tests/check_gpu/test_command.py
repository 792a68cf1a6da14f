# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The command, its rows, table, JSON line and budget, and checks that fail, hang, or crash."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from check_gpu import command, owner
from check_gpu.row import RowsFile
from check_gpu.table import Check

from torchtitan.grpo.commands import cli

BENCHMARKS = Path(command.__file__).resolve().parents[1]

# How checks end, each as the body of a module.
ENDINGS = {
    "fine": "    yield Row('one', 'passed', {'widgets': 3.0}, 'three widgets')",
    "wrong": "    yield Row('one', 'failed', reason='two widgets', cannot_tell='gadgets')",
    "raising": "    yield Row('one', 'passed')\n    raise ValueError('no such widget')",
    "crashing": "    yield Row('one', 'passed')\n    os.kill(os.getpid(), 11)",
    "hanging": "    yield Row('one', 'passed')\n    time.sleep(600)",
    "patient": """\
    yield Row('one', 'passed')
    while not os.path.exists('go'):
        time.sleep(0.02)
    yield Row('two', 'passed', facts={'PATIENCE': os.environ['PATIENCE']})""",
    "silent": "    yield from ()",
}


@pytest.fixture
def make_check(tmp_path, monkeypatch):
    # The children import what lies in the folder in which they start.
    monkeypatch.chdir(tmp_path)
    opening = "import os\nimport time\nfrom check_gpu.row import Row\n"

    def make(ending: str, needs: float = 1.0, limit: float = 300.0) -> Check:
        body = f"{opening}\n\ndef run(settings):\n{ENDINGS[ending]}\n"
        Path(tmp_path, f"check_that_is_{ending}.py").write_text(body)
        return Check(
            ending, f"check_that_is_{ending}", needs, limit, "Is it?", "colours",
            environment={"PATIENCE": "much"},
        )  # fmt: skip

    return make


def run_command(capsys, checks: list[Check], *arguments: str) -> tuple[int, list[str], dict]:
    """Returns the exit status, the lines before the last one, and what that one holds."""
    status = command.main(["--device", "cpu", "--output", "out", *arguments], checks)
    *lines, last = capsys.readouterr().out.splitlines()
    return status, lines, json.loads(last)


def test_rows_that_pass_end_in_status_0_a_table_and_a_json_line(make_check, capsys):
    checks = [make_check("fine"), make_check("wrong")]
    status, lines, result = run_command(capsys, checks, "--only", "fine")
    assert status == 0
    assert "passed    fine: one  widgets 3 [three widgets]" in lines
    begin = lines.index("fine  (cannot tell: colours)")
    assert lines[begin + 1 : begin + 3] == ["  passed    one  widgets 3", "0 of 1 rows failed."]
    assert result["ok"] and result["device"] == "cpu" and "no GPU" in result["note"]
    assert result["rows"][0]["figures"] == {"widgets": 3.0}
    assert result["machine"].keys() >= {"commit", "python", "torch", "torchtitan"}


def test_a_check_that_fails_spoils_no_other(make_check, capsys):
    checks = [make_check("wrong"), make_check("raising"), make_check("fine")]
    status, lines, result = run_command(capsys, checks)
    assert status == 1 and not result["ok"]
    found = [(row["check"], row["status"]) for row in result["rows"]]
    assert found == [
        ("wrong", "failed"), ("raising", "passed"), ("raising", "failed"), ("fine", "passed"),
    ]  # fmt: skip
    assert "no such widget" in result["rows"][2]["reason"]
    assert "wrong  (cannot tell: gadgets)" in lines  # a row's own goes before the check's
    assert "  wrong: one: two widgets" in lines[lines.index("2 of 4 rows failed:") :]


def test_rows_are_passed_on_and_written_before_their_check_ends(make_check, tmp_path):
    rows = owner.Owner("cpu", tmp_path, time.monotonic() + 300).run(make_check("patient"))
    assert next(rows).case == "one"
    (line,) = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert json.loads(line)["check"] == "patient"
    (tmp_path / "go").touch()
    (second,) = rows
    assert second.case == "two" and second.facts == {"PATIENCE": "much"}


@pytest.mark.parametrize(
    ("ending", "limit", "left", "status", "reason"),
    [
        ("crashing", 300.0, 300.0, "failed", "signal 11"),
        ("hanging", 12.0, 300.0, "failed", r"must end within 12 s"),
        ("hanging", 300.0, 16.0, "cut", r"must end within 1[0-2] s"),
        ("silent", 300.0, 300.0, "failed", "at least one row"),
    ],
)
def test_rows_before_a_crash_or_a_hang_are_kept(
    ending, limit, left, status, reason, make_check, tmp_path
):
    runs = owner.Owner("cpu", tmp_path, time.monotonic() + left)
    *first, last = runs.run(make_check(ending, limit=limit))
    assert [(row.case, row.status) for row in first] == [("one", "passed")] * (ending != "silent")
    assert last.status == status and re.search(reason, last.reason) and last.check == ending


def test_the_first_checks_run_and_no_check_begins_that_cannot_end(make_check, capsys):
    needs = {"fine": 1.0, "wrong": 500.0, "silent": 90.0}
    checks = [make_check(ending, seconds) for ending, seconds in needs.items()]
    status, lines, result = run_command(capsys, checks, "--budget-seconds", "60")
    assert status == 0
    assert [row["status"] for row in result["rows"]] == ["passed", "skipped", "skipped"]
    assert "s left, needs 500 s" in result["rows"][1]["reason"]
    assert any(line.startswith("  skipped   the whole check; ") for line in lines)
    written = Path("out", "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == result["rows"]


PARENT = f"""\
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
sys.argv = ["check-gpu", "check-gpu"]
import torchtitan_grpo
torchtitan_grpo._light_start().install_bare_package()
from check_gpu import command
from check_gpu.table import Check
check = Check("hanging", "check_that_is_hanging", 1.0, 300.0, "Is it?")
print("torch" in sys.modules, flush=True)
command.main(["--device", "cpu", "--output", "out"], [check])
"""


def test_rows_survive_the_end_of_the_command_which_imports_no_torch(make_check, tmp_path):
    make_check("hanging")
    rows = RowsFile(tmp_path / "out" / "rows.jsonl")
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    assert parent.stdout is not None
    assert parent.stdout.readline() == "False\n"
    while not any("hanging: one" in line for line in [parent.stdout.readline()]):
        assert time.monotonic() < deadline and parent.poll() is None
    (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    assert [row.case for row in rows.new()] == ["one"]
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < deadline, "the check's process must end with the command"
        time.sleep(0.05)


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_machine_without_a_gpu_gets_one_message(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.run(["check-gpu", "--output", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: check-gpu needs a GPU")
    assert len(captured.err.splitlines()) == 1
