# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``prompts.rename`` reaches values within columns by a path."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchtitan.grpo.rollout.tables import open_table

ROW: dict[str, Any] = {
    "prompt": "q",
    "reward_model": {"ground_truth": "21", "style": {"name": "rule"}},
    "choices": ["a", "b"],
    "answers": {"text": ["x", "y"]},
    "answer": {"value": 5},
    "a.b": "dotted",
    "nothing": None,
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "folder"])
@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"reward_model.ground_truth": "gold"}, "21"),
        ({"reward_model.style.name": "gold"}, "rule"),
        ({"reward_model.style": "gold"}, {"name": "rule"}),
        ({"choices.1": "gold"}, "b"),
        ({"answers.text": "gold"}, ["x", "y"]),
        ({"answers.text.0": "gold"}, "x"),
        ({"answer.value": "gold"}, 5),
        ({"a.b": "gold"}, "dotted"),
        ({"nothing.of.this": "gold"}, None),
    ],
)
def test_a_path_gives_what_is_within_a_column_a_name(tmp_path: Path, name, rename, expected):
    path = tmp_path / name
    if name == "folder":  # a Hugging Face data set
        path.mkdir()
        write(path / "train.parquet", [ROW] * 3)
    else:
        write(path, [ROW] * 3)
    table = open_table(str(path), "train", rename, "prompt", "prompts.path")
    try:
        row = table.row(2)
    finally:
        table.close()
    assert row["gold"] == expected and row["prompt"] == "q"
    if "a.b" not in rename:  # only what is within a column is named, and the column stays
        assert row["reward_model"] == ROW["reward_model"]


def test_a_value_within_the_column_answer_can_take_its_name(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [ROW])
    table = open_table(path, "train", {"answer.value": "answer"}, "prompt", "prompts.path")
    assert table.row(0)["answer"] == 5
    table.close()


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (
            {"reward_model.truth": "gold"},
            r"reward_model has no 'truth', got keys \['ground_truth', 'style'\]",
        ),
        (
            {"reward_model.style.name.x": "gold"},
            r"reward_model\.style\.name has no 'x', got 'rule'",
        ),
        ({"choices.2": "gold"}, r"choices has no '2', got \['a', 'b'\]"),
        (
            {"model.ground_truth": "gold"},
            r"names the column 'model\.ground_truth', which does not exist",
        ),
        ({"prompt.text": "gold"}, r"prompt has no 'text', got 'q'"),
        ({"reward_model.ground_truth": "choices"}, r"would overwrite the column 'choices'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path, rename, message):
    path = write(tmp_path / "rows.jsonl", [ROW])
    with pytest.raises(ValueError, match=message):
        open_table(path, "train", rename, "prompt", "prompts.path")
