# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""`scripts/draw_runs.py`, on the files of runs."""

import json
from pathlib import Path

import pytest
from load_script import load_script

script = load_script("scripts/draw_runs.py")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two runs; the second evaluates a set less often."""
    made = []
    for name, evaluated in (("seed0", (0, 2, 4)), ("seed1", (0, 4))):
        folder = tmp_path / name
        folder.mkdir()
        steps = [{"step": step, "reward/mean": step / 5, "grad_norm": 3.0} for step in range(1, 5)]
        sets = [
            {"step": step, "evaluation/score": 0.5, "evaluation/sums/score": step / 4}
            for step in evaluated
        ]
        for file, rows in (("metrics", [{"step": 0}, *steps]), ("evaluations", sets)):
            (folder / f"{file}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        made.append(folder)
    return made


def test_every_run_and_set_is_drawn(folders, monkeypatch, tmp_path):
    lines, limits = {}, []

    def save(figure, *_, **__):
        (axes,) = figure.axes
        lines.update({line.get_label(): line.get_xydata().tolist() for line in axes.lines})
        limits.append(axes.get_ylim())

    monkeypatch.setattr(script.plt.Figure, "savefig", save)
    script.draw(folders, "reward/mean", "title", tmp_path / "curve.png")
    assert len(lines) == 4 and limits == [(0, 1.02)]
    assert lines["seed0: sums"] == [[0, 0], [2, 0.5], [4, 1]]
    assert lines["seed1: sums"] == [[0, 0], [4, 1]]
    running = [points for label, points in lines.items() if label.startswith("_")]
    assert running[0] == [[1, pytest.approx(0.2)], [2, pytest.approx(0.3)],
                          [3, pytest.approx(0.4)], [4, pytest.approx(0.5)]]  # fmt: skip


def test_a_picture_is_written(folders, monkeypatch, tmp_path):
    output = tmp_path / "curve.png"
    arguments = ["draw_runs.py", *map(str, folders), "--metric", "grad_norm"]
    monkeypatch.setattr("sys.argv", [*arguments, "--output", str(output)])
    (folders[1] / "evaluations.jsonl").unlink()  # a run without [evaluation]
    bounds = []
    save = script.plt.Figure.savefig
    monkeypatch.setattr(
        script.plt.Figure, "savefig",
        lambda figure, *a, **k: (bounds.append(figure.axes[0].get_ylim()), save(figure, *a, **k)),
    )  # fmt: skip
    script.main()
    assert bounds[0][0] <= 0 and bounds[0][1] >= 3
    assert output.read_bytes().startswith(b"\x89PNG")
