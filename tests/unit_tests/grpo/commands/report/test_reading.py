# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The logs of a run are read as they grow, in bounded memory, whatever is damaged in them."""

import gzip
import json

import numpy as np
import pytest
from made_run import make_run

from torchtitan.grpo.commands import cli
from torchtitan.grpo.commands.report.content import Run, read_settings
from torchtitan.grpo.commands.report.reading import Metrics, Samples, decimated, spread_evenly


def records_of(content: bytes) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(content).splitlines()]


def test_metrics_are_read_on_and_begun_again_with_a_replaced_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 1.5}\n{"step": 2, "b": null}\n{"step": 3, "a"')
    metrics = Metrics(file)
    metrics.update()
    assert list(metrics.steps) == [1, 2]
    assert metrics.column("a")[0] == 1.5 and np.isnan(metrics.column("a")[1])
    assert np.isnan(metrics.column("b")[0]) and np.isinf(metrics.column("b")[1])
    with file.open("a") as stream:
        stream.write(': 4.0}\n{"step": 3, "a": 5.0}\n')  # restarted ranks repeat a step
    metrics.update()
    assert list(metrics.steps) == [1, 2, 3] and list(metrics.known("a")) == [1.5, 5.0]
    assert all(len(column) == 3 for column in metrics.columns.values())
    new = tmp_path / "new"
    new.write_text('{"step": 1, "a": 9.0}\n')
    new.replace(file)
    metrics.update()
    assert list(metrics.steps) == [1] and list(metrics.columns) == ["a"]


@pytest.mark.parametrize(
    "line",
    ["", "nonsense", "[1]", "{}", '{"step": "1"}', '{"step": true}', '{"step": -1}', '{"step": 1e9}',
     '{"step": 99999999999999999999}', "[" * 100_000, '{"step": 2, "a": ', "\x00\x01"],
)  # fmt: skip
def test_a_damaged_line_is_counted_and_left_out(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{line}\n{{"step": 1, "a": NaN, "b": "x", "c": 1e999, "d": 2}}\n')
    metrics = Metrics(file)
    metrics.update()
    assert metrics.num_damaged == 1 and list(metrics.steps) == [1]
    assert list(metrics.known("d")) == [2.0] and not len(metrics.known("a")) + len(
        metrics.known("c")
    )


def test_decimation_keeps_extremes_gaps_and_ends():
    steps, values = np.arange(10_000), np.sin(np.arange(10_000) / 500)
    values[1234], values[7777], values[5000:5100] = 9.0, -9.0, np.inf
    x, y = decimated(steps, values, 2000)
    assert len(x) <= 2001 and x[-1] == 9999 and (np.diff(x) > 0).all()
    assert y[x == 1234] == 9.0 and y[x == 7777] == -9.0
    assert np.isinf(y[(x > 5005) & (x < 5095)]).all() and np.isinf(y).sum() >= 10
    assert (np.isin(np.stack([x, y]).T[np.isfinite(y)][:, 1], values)).all()
    values[:] = np.nan
    assert not len(decimated(steps, values, 2000)[0])
    x, _ = decimated(steps[:50], np.zeros(50), 2000)
    assert list(x) == list(range(50)), "few points stay as they are"


def test_steps_are_spread_evenly_wherever_one_stops():
    for count in (0, 1, 2, 3, 10, 1000):
        order = spread_evenly(list(range(count)))
        assert sorted(order) == list(range(count))
        assert order[:2] == [*{0: None, count - 1: None}][: min(2, count)]
    order = sorted(spread_evenly(list(range(1000)))[:100])
    assert max(np.diff(order)) <= 16


def test_samples_stay_within_their_budget_in_whole_groups(tmp_path):
    make_run(tmp_path, 60, groups=6, size=4)
    samples = Samples(tmp_path / "samples.jsonl")
    samples.update()
    content, facts = samples.pick(100_000)
    records = records_of(content)
    assert 60_000 < len(content) <= 101_000
    assert facts["of"] == 60 * 6 * 4 and facts["kept"] == len(records) < facts["of"]
    groups: dict[tuple[int, int], int] = {}
    for record in records:
        key = (record["step"], record["number"])
        groups[key] = groups.get(key, 0) + 1
    assert set(groups.values()) == {4}
    steps = sorted({step for step, _ in groups})
    assert steps[0] == 1 and steps[-1] == 60 and facts["steps"] == len(steps)
    assert max(np.diff(steps)) <= 2 * min(np.diff(steps)[:-1]) + 1, "evenly spaced"
    assert samples.pick(10**8)[1]["kept"] == facts["of"]
    few = records_of(samples.pick(10**8, 12, 13)[0])
    assert {record["step"] for record in few} == {12, 13} and len(few) == 48


def test_a_sample_has_bounded_texts_and_no_copy_of_its_context(tmp_path):
    part = {"role": "model", "trained": True, "num_tokens": 9000, "text": "x" * 50_000}
    record = {
        "step": 1,
        "number": 1,
        "group_id": 1,
        "prompt": "p",
        "completion": "c",
        "context": [part],
    }
    record["tokens"] = {"text": ["x"] * 9000}
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps(record) + '\n{"step": 2, "number": 1, cut\n')
    samples = Samples(file)
    samples.update()
    content, facts = samples.pick(10**6)
    (held,) = records_of(content)
    assert "prompt" not in held and "completion" not in held
    assert held["context"][0]["text"].endswith("… (30000 more characters are in the file)")
    assert len(held["tokens"]["text"]) == 4000
    assert facts["damaged"] == 1 and facts["of"] == 1


def test_settings_keep_their_marks_and_nothing_that_looks_like_one():
    text = (
        '# Configuration\n\n[job]\nname = "a  # default: b"\nother = "x"  # default: "y"\n'
        '"odd key" = 1\n# third is not set  # default: 3\n# key is set; its value is not kept\n'
        "broken\n[reward.judge]\nlist = [1, 2]\n"
    )
    assert list(read_settings(text)) == [
        ("job", "name", '"a  # default: b"', None),
        ("job", "other", '"x"', '"y"'),
        ("job", '"odd key"', "1", None),
        ("job", "third", "not set", "3"),
        ("job", "key", "set; its value is not kept", None),
        ("reward.judge", "list", "[1, 2]", None),
    ]


def test_the_content_of_a_run_survives_damage(tmp_path):
    make_run(tmp_path, 12, groups=1, size=2)
    for name in ("metrics.jsonl", "samples.jsonl", "events.jsonl", "evaluations.jsonl"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"\xff\xfe{damaged\n" + content + b'{"step": 13, "cut')
    for name in ("summary.json", "starts/1/environment.json", "starts/1/config.toml"):
        (tmp_path / name).write_bytes(b"\xff[1, 2")
    run = Run(tmp_path)
    run.update()
    content = run.content()
    assert content["header"]["steps"] == 12 and content["damaged"] == 2
    assert content["header"]["state"] == "stopped" and content["settings"] == []
    assert content["shares"]["servers"]["10.0.0.1:8000"]["lag"] == [1] * 12


def test_a_resumed_run_tells_its_starts_and_what_changed(tmp_path):
    make_run(tmp_path, 10, groups=1, size=2)
    second = tmp_path / "starts" / "2"
    second.mkdir()
    text = (tmp_path / "starts/1/config.toml").read_text().replace("lr = 1e-06", "lr = 2e-06")
    (second / "config.toml").write_text(text)
    run = Run(tmp_path)
    run.update()
    starts = run.content()["starts"]
    assert [start["number"] for start in starts] == [1, 2]
    assert starts[1]["changed"] == {"optimizer.lr": "2e-06"} and starts[0]["changed"] == {}


def test_json_holds_header_advisories_and_last_values(tmp_path, capsys):
    make_run(tmp_path, 10, groups=1, size=2)
    assert cli.run(["report", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"header", "advisories", "last"}
    assert told["header"]["steps"] == 10 and told["header"]["state"] == "ended"
    assert told["last"]["policy_version"] == 10 and "evaluation/score" in told["last"]
    assert told["advisories"][0]["change"] == "reward.judge.max_concurrent"


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert cli.run(["report", str(tmp_path)]) == 2
    assert "needs the folder of a run" in capsys.readouterr().err
    make_run(tmp_path / "run", 2, groups=1, size=2)
    assert cli.run(["report", str(tmp_path / "run"), "--steps", "x"]) == 2
    assert "--steps must be a step or FIRST-LAST" in capsys.readouterr().err
