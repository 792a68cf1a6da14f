# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""All JSON that the project writes is JSON in the strict sense, and what earlier releases wrote is read."""

import ast
import json
import math
from pathlib import Path
from typing import Any

import pytest

from torchtitan.grpo import strict_json
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.monitoring.site import Health, healthz
from torchtitan.grpo.observe.report import (
    RunOutcome,
    draw_reward_curve,
    summarize,
    summarize_supervised,
    write_summary,
)
from torchtitan.grpo.observe.run_log import RunLog
from torchtitan.grpo.verify import check_run

NAN, INF = math.nan, math.inf


def strictly(text: str) -> Any:
    """Parses as jq does: NaN and infinite numbers are no JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in {text}")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": 1.5, "b": None, "c": "NaN", "d": [True]}, {"a": 1.5, "b": None, "c": "NaN", "d": [True]}),
        ({"a": NAN, "b": 1}, {"a": None, "b": 1, "nonfinite_values": 1}),
        ({"a": INF, "b": -INF}, {"a": None, "b": None, "nonfinite_values": 2}),
        ({"a": {"b": [1, NAN, (INF, 2)]}}, {"a": {"b": [1, None, [None, 2]]}, "nonfinite_values": 2}),
        ([NAN, 1], [None, 1]),
        (-INF, None),
        ({"a": 1e308 * 10, "b": 5e-324}, {"a": None, "b": 5e-324, "nonfinite_values": 1}),
        ({"a": 2**70, 3: 0.0}, {"a": 2**70, "3": 0.0}),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_null_and_counted(value, expected):
    assert strictly(strict_json.dumps(value)) == expected
    assert strictly(strict_json.dumps(value, indent=2, ensure_ascii=False)) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.5, 1.5), (0, 0), (NAN, None), (INF, None), (-INF, None), (None, None), ("1", None)],
)
def test_readers_take_null_and_what_earlier_releases_wrote(value, expected):
    assert strict_json.finite(value) == expected


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_log_of_steps_is_strict_and_is_continued_over_lines_of_either_kind(tmp_path: Path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "mismatch/kl": NaN}\n{"step": 2, "mismatch/kl": -Infinity}\n')
    log = RunLog(path, 2)
    log.add({"step": 3, "mismatch/kl": bad, "reward/mean": 0.5, "samples": [{"advantage": bad}]})
    log.close()
    assert strictly(path.read_text().splitlines()[2]) == {
        "step": 3, "mismatch/kl": None, "reward/mean": 0.5, "samples": [{"advantage": None}],
        "nonfinite_values": 2,
    }  # fmt: skip
    log = RunLog(path, 3)
    assert [record["step"] for record in log.read()] == [1, 2, 3]
    log.close()


def steps(bad: Any) -> list[dict[str, Any]]:
    keys = (
        "reward/mean",
        "staleness/max_steps",
        "staleness/mean_steps",
        "mismatch/kl",
        "sft/epoch",
    )
    keys = (*keys, "reward/equal_groups_fraction", "loss/total", "staleness/mixed_version_fraction")
    good = dict.fromkeys(keys, 0.5)
    return [{"step": 1, **good}, {"step": 2, **dict.fromkeys(keys, bad)}, {"step": 3, **good}]


@pytest.mark.parametrize("bad", [NAN, INF, None])
def test_the_summary_leaves_out_what_is_no_number_and_is_strict(tmp_path: Path, bad):
    outcome = RunOutcome(3, INF, 3, 0, tmp_path)
    evaluations = [{"step": 0, "evaluation/score": bad, "evaluation/loss": bad}]
    for describe in (summarize, summarize_supervised):
        made = strictly(
            write_summary(tmp_path, describe(outcome, steps(bad), evaluations)).read_text()
        )
        assert made["seconds"] is None and made["nonfinite_values"] >= 1
        assert 0.5 in (made.get("mismatch_kl_mean"), made.get("loss_last10"))


@pytest.mark.parametrize("bad", [NAN, INF, None])
def test_curve_and_verification_accept_what_is_no_number(tmp_path: Path, bad):
    config = JobConfig()
    config.reward.functions = ["exact_match"]
    assert draw_reward_curve(tmp_path, steps(bad), [], config).is_file()
    write_summary(tmp_path, summarize(RunOutcome(3, 1.0, 3, 0, tmp_path), steps(bad), []))
    text = "".join(json.dumps(record) + "\n" for record in steps(bad))  # as earlier releases did
    (tmp_path / "metrics.jsonl").write_text(text)
    assert all(check.holds for check in check_run(tmp_path, want_in_flight=True))


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("damage", [b"{", b"\xff{}", b"[]", b'{"step": 1,}', b"null"])
def test_a_damaged_file_of_a_run_is_named_where_it_is_verified(tmp_path: Path, file, damage):
    write_summary(tmp_path, summarize(RunOutcome(3, 1.0, 3, 0, tmp_path), steps(0.5), []))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps(0.5)))
    (tmp_path / file).write_bytes(damage)
    with pytest.raises(ValueError, match=f"{file}.* is damaged: "):
        check_run(tmp_path, want_in_flight=True)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_health_is_strict(bad):
    body = healthz(Health(None, {"phase_seconds": bad}), is_allowed=True).text
    assert body is not None and strictly(body)["nonfinite_values"] == 1


def writes_of(tree: ast.AST) -> list[ast.Call]:
    """The calls of Python's own writers of JSON."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [c for c in calls if ast.unparse(c.func) in ("json.dumps", "json.dump")]


def test_nothing_is_written_around_the_helper_without_saying_what_becomes_of_such_numbers(
    repository,
):
    package = repository / "torchtitan/grpo"
    around = {
        f"{path.relative_to(package)}:{call.lineno}"
        for path in package.rglob("*.py")
        for call in writes_of(ast.parse(path.read_text()))
        if "allow_nan" not in {keyword.arg for keyword in call.keywords}
    }
    assert not around
    assert len(writes_of(ast.parse((package / "strict_json.py").read_text()))) == 1
