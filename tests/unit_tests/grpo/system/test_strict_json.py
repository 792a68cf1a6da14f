# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""JSON of the project is strict, JSON of earlier releases is read, and what `verify` reads from a run."""

import ast
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from torchtitan.grpo.commands.verify import check_run, main
from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.observe.summary import (
    RunOutcome,
    summarize,
    summarize_supervised,
    write_summary,
)
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.monitoring.site import Health, healthz

NAN, INF = math.nan, math.inf


def strictly(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in {text}")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": 1.5, "b": None, "c": "NaN", "d": [True]}, {"a": 1.5, "b": None, "c": "NaN", "d": [True]}),
        ({"a": NAN, "b": 1}, {"a": None, "b": 1, "nonfinite_values": 1}),
        ({"a": {"b": [1, NAN, (INF, 2)]}}, {"a": {"b": [1, None, [None, 2]]}, "nonfinite_values": 2}),
        ([NAN, 1], [None, 1]),
        (-INF, None),
        ({"a": 2**70, 3: 0.0}, {"a": 2**70, "3": 0.0}),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_null_and_counted(value, expected):
    assert strictly(strict_json.dumps(value)) == expected


@pytest.mark.parametrize("bad", [NAN, -INF])
def test_a_log_of_steps_is_strict_and_is_continued_over_lines_of_either_kind(tmp_path: Path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "mismatch/kl": NaN}\n{"step": 2, "mismatch/kl": -Infinity}\n')
    log = RunLog(path, 2)
    log.add({"step": 3, "mismatch/kl": bad, "reward/mean": 0.5, "loss/total": bad})
    log.close()
    assert strictly(path.read_text().splitlines()[2]) == {
        "step": 3, "mismatch/kl": None, "reward/mean": 0.5, "loss/total": None,
        "nonfinite_values": 2,
    }  # fmt: skip
    log = RunLog(path, 3)
    assert [record["step"] for record in log.read()] == [1, 2, 3]
    log.close()


def steps(bad: Any) -> list[dict[str, Any]]:
    keys = [f"staleness/{name}" for name in ("max_steps", "mean_steps", "mixed_version_fraction")]
    keys += [
        "reward/mean",
        "reward/equal_groups_fraction",
        "mismatch/kl",
        "sft/epoch",
        "loss/total",
    ]
    good = dict.fromkeys(keys, 0.5)
    return [{"step": 1, **good}, {"step": 2, **dict.fromkeys(keys, bad)}, {"step": 3, **good}]


@pytest.mark.parametrize("bad", [NAN, INF, None])
def test_the_summary_and_its_readers_leave_out_what_is_no_number(tmp_path: Path, bad):
    outcome = RunOutcome(3, INF, 3, 0, tmp_path)
    evaluations = [{"step": 0, "evaluation/score": bad, "evaluation/loss": bad}]
    for describe in (summarize_supervised, summarize):
        file = write_summary(tmp_path, describe(outcome, steps(bad), evaluations))
        made = strictly(file.read_text())
        assert made["seconds"] is None and made["nonfinite_values"] >= 1
        assert 0.5 in (made.get("mismatch_kl_mean"), made.get("loss_last10"))
    text = "".join(json.dumps(record) + "\n" for record in steps(bad))  # as earlier releases did
    (tmp_path / "metrics.jsonl").write_text(text)
    assert all(check.holds for check in check_run(tmp_path, want_in_flight=True))
    assert strictly(healthz(Health(None, {"phase_seconds": bad}), is_allowed=True).text or "")


@pytest.mark.parametrize("damage", [b"{", b"\xff{}", b"[]", b"null"])
def test_a_damaged_file_of_a_run_is_named_where_it_is_verified(tmp_path: Path, damage):
    write_summary(tmp_path, summarize(RunOutcome(3, 1.0, 3, 0, tmp_path), steps(0.5), []))
    for file in ("metrics.jsonl", "summary.json"):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps(0.5)))
        (tmp_path / file).write_bytes(damage)
        with pytest.raises(ValueError, match=f"{file}.* is damaged: "):
            check_run(tmp_path, want_in_flight=True)


def test_the_summary_says_what_the_run_waited_for_and_dropped(tmp_path: Path):
    counts = {"rollout/rewards_raised": 17.0, "rollout/unscored_by_function": 212.0}
    waits = {"time/wait_data_fraction": 0.4, "rollout/wait_rewards_fraction": 0.25}
    made = summarize(RunOutcome(2, 1.0, 2, 0, tmp_path), [counts | waits] * 2, [])
    assert made["dropped"] == {"rewards raised": 34, "completions unscored by function": 424}
    known = {name: value for name, value in made["waits"].items() if value is not None}
    assert known == waits and "rollout/idle_fraction" in made["waits"]


def writes_of(tree: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [c for c in calls if ast.unparse(c.func) in ("json.dumps", "json.dump")]


def test_nothing_writes_such_numbers_around_the_helper(repository):
    package = repository / "torchtitan/grpo"
    around = {
        f"{path.relative_to(package)}:{call.lineno}"
        for path in package.rglob("*.py")
        for call in writes_of(ast.parse(path.read_text()))
        if "allow_nan" not in {keyword.arg for keyword in call.keywords}
    }
    assert not around
    assert len(writes_of(ast.parse((package / "system/strict_json.py").read_text()))) == 2


LISTS = ["[" * depth + "]" * depth for depth in (100, 101, 900, 100_000)]


@pytest.mark.parametrize(
    "text",
    ["NaN", "[-Infinity]", '{"a": 1e999}', "-1e999", *LISTS[1:], '{"a":' * 101 + "1" + "}" * 101]
    + ['[{"a":' * 60 + "1" + "}]" * 60, "1" * 5000, "", " ", "1 2", "{} x", "[", '"\n"'],
)
def test_json_from_outside_is_strict(text: str) -> None:
    with pytest.raises(ValueError):
        strict_json.loads(text)


@pytest.mark.parametrize(
    "text", [" 1.0\n", '{"a": [1e3, null]}', LISTS[0], '"[[["', "[" + "[]," * 200 + "1]"]
)
def test_other_json_from_outside_is_read(text: str) -> None:
    assert strict_json.loads(text) == json.loads(text)
    assert strict_json.load_at(f"ab{text.strip()}cd", 2) == (
        json.loads(text),
        2 + len(text.strip()),
    )


# -- verification of a run -------------------------------------------------------------------

SUMMARY = {"steps": 2, "policy_version": 2, "server_version": 2, "weight_sync_failures": 0}


@pytest.fixture
def write_run(tmp_path):
    def write(mixed, **summary):
        records = [{"staleness/mixed_version_fraction": fraction} for fraction in mixed]
        (tmp_path / "summary.json").write_text(json.dumps(SUMMARY | summary))
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        return tmp_path

    return write


def test_a_run_passes_and_an_idle_server_fails_with_what_to_change(write_run):
    assert all(check.holds for check in check_run(write_run([0.0, 0.25]), want_in_flight=True))
    run = write_run([0.0, 0.0])
    *others, in_flight = check_run(run, want_in_flight=True)
    assert all(check.holds for check in others)
    assert not in_flight.holds
    assert "Lower rollout.max_concurrent_rollouts" in in_flight.found
    assert all(check.holds for check in check_run(run, want_in_flight=False))


def test_a_version_that_did_not_arrive_fails(write_run):
    for summary in ({"server_version": 1}, {"policy_version": 1}, {"weight_sync_failures": 1}):
        checks = check_run(write_run([0.5], **summary), want_in_flight=True)
        assert [check.holds for check in checks].count(False) == 1


def test_what_cannot_be_compared_is_refused_in_one_sentence(write_run, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "1+1="}\n')
    command = ["--kind", "vllm", "--url", "http://127.0.0.1:9", "--prompts", str(prompts), "--run"]
    for run, message in (
        (tmp_path / "unfinished", "finished run with servers.*there is no such file"),
        (write_run([0.5]), r"column prompt, got none in .*prompts.jsonl:1\."),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*command, str(run)], {})
        assert re.search(message, capsys.readouterr().err)
