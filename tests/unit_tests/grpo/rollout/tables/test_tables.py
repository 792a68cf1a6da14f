# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import codecs
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.grpo.rollout.tables import RowError, open_table
from torchtitan.grpo.rollout.tables.arrow import ParquetTable
from torchtitan.grpo.rollout.tables.jsonl import JsonlTable, index_lines


def write_lines(path: Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def jsonl(path: str, **settings: Any) -> JsonlTable:
    return JsonlTable(path, {}, "prompt", "prompts.path", **settings)


def parquet(path: Path, rows: list[dict[str, Any]], group_size: int, **settings: Any):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group_size)
    return ParquetTable(str(path), {}, "prompt", "prompts.path", **settings)


LINE = st.sampled_from([b"", b" ", b"\t \x0b\r", b" " * 9, b'{"prompt":1}', b' {"prompt":2}'])


@given(st.lists(LINE, max_size=30), st.booleans(), st.booleans(), st.integers(1, 40))
def test_the_lines_of_a_file_are_those_that_python_finds(
    tmp_path_factory, lines, is_ended, has_mark, block_bytes
):
    content = b"\n".join(lines) + (b"\n" if is_ended else b"")
    path = tmp_path_factory.mktemp("lines") / "lines"
    path.write_bytes((codecs.BOM_UTF8 if has_mark else b"") + content)
    expected = [
        (f"{path}:{number}", json.loads(line))
        for number, line in enumerate(io.BytesIO(content), start=1)
        if line.strip()
    ]
    table = jsonl(str(path))
    assert [(table.where(i), table.row(i)) for i in range(len(table))] == expected
    with path.open("rb", buffering=0) as file:  # wherever the blocks end
        for one, other in zip(index_lines(file), index_lines_of(path, block_bytes), strict=True):
            assert one.tolist() == other.tolist()
    table.close()


def index_lines_of(path: Path, block_bytes: int):
    with path.open("rb", buffering=0) as file:
        return index_lines(file, block_bytes)


def test_rows_come_in_a_row_with_those_that_cannot_be_used(tmp_path: Path):
    lines = ['{"prompt": "a"}', "[1]", '{"prompt": "b"}', "{}"]
    rows = jsonl(write_lines(tmp_path / "p.jsonl", lines))
    found = list(rows.rows(0, 4))
    assert found[::2] == [{"prompt": "a"}, {"prompt": "b"}]
    assert [type(row) for row in found[1::2]] == [RowError, RowError]
    assert list(rows.rows(2, 3)) == [{"prompt": "b"}]
    Path(rows.path).write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"p.jsonl:3: the file has become shorter"):
        rows.row(2)
    rows.close()
    deep = '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"
    with pytest.raises(ValueError, match=r"p.jsonl:1: every line of prompts.path"):
        jsonl(write_lines(tmp_path / "p.jsonl", [deep]))


ROWS = [{"prompt": f"p{i}", "answer": i} for i in range(23)]


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_parquet_rows_come_in_any_order_whatever_is_kept(tmp_path: Path, cache_bytes: int):
    rows = parquet(tmp_path / "p.parquet", ROWS, 5, cache_bytes=cache_bytes)
    assert len(rows) == 23
    for i in (22, 0, 4, 5, 21, 9, 10, 0, 14, 15, 19, 20):
        assert rows.row(i) == ROWS[i]
    assert list(rows.rows(3, 18)) == ROWS[3:18]
    assert rows._num_cached_bytes() <= max(cache_bytes, 1000)
    assert rows.where(7).endswith("p.parquet, row 7")
    rows.close()
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    row = {"prompt": messages, "extra": {"ids": [1, 2], "deep": [{"x": None}, {"x": 1.5}]}}
    assert parquet(tmp_path / "q.parquet", [row], 1).row(0) == row


def test_directory_of_parquet_shards_is_a_data_set(tmp_path: Path):
    for shard in range(2):
        part = pa.Table.from_pylist(ROWS[10 * shard : 10 * shard + 10])
        pq.write_table(part, tmp_path / f"train-0000{shard}-of-00002.parquet")
    rows = open_table(str(tmp_path), "train", {}, "prompt", "prompts.path")
    assert list(rows.rows(0, len(rows))) == ROWS[:20]


def test_empty_row_groups_are_passed_over(tmp_path: Path):
    path = tmp_path / "p.parquet"
    table = pa.Table.from_pylist(ROWS)
    with pq.ParquetWriter(path, table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 3), table.slice(3, 0), table.slice(3)):
            writer.write_table(part)
    rows = open_table(str(path), "train", {"answer": "a"}, "prompt", "prompts.path")
    assert [rows.row(i)["a"] for i in range(23)] == list(range(23))


def test_bad_parquet_is_refused(tmp_path: Path):
    path = tmp_path / "p.parquet"
    with pytest.raises(ValueError, match=r"there is no column 'prompt'. Existing columns: \['q'\]"):
        parquet(path, [{"q": "a"}], 1)
    with pytest.raises(ValueError, match=r"prompts.path: .*p.parquet contains no prompts"):
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
        open_table(str(path), "train", {}, "prompt", "prompts.path")
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"prompts.path: .*p.parquet cannot be read as parquet"):
        open_table(str(path), "train", {}, "prompt", "prompts.path")
    with pytest.raises(
        ValueError, match=r"prompts.path: /no/p.parquet cannot be read: the file does"
    ):
        open_table("/no/p.parquet", "train", {}, "prompt", "prompts.path")


def test_row_group_that_cannot_be_decoded_is_named(tmp_path: Path):
    path = tmp_path / "p.parquet"
    rows = [{"prompt": f"{i * 7919 % 1000003}" * 20} for i in range(400)]
    pq.write_table(
        pa.Table.from_pylist(rows), path, row_group_size=200, use_dictionary=False,
        compression="gzip",
    )  # fmt: skip
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    table = ParquetTable(str(path), {}, "prompt", "prompts.path")
    assert table.row(3) == rows[3]
    with pytest.raises(ValueError, match=r"p.parquet, row 250: row group 1 cannot be decoded"):
        table.row(250)
    found = list(table.rows(150, 400))
    assert found[:50] == rows[150:200]
    assert all(isinstance(row, RowError) for row in found[50:])


ROW: dict[str, Any] = {
    "prompt": "q",
    "reward_model": {"ground_truth": "21", "style": {"name": "rule"}},
    "choices": ["a", "b"],
    "answers": {"text": ["x", "y"]},
    "answer": {"value": 5},
    "a.b": "dotted",
    "nothing": None,
}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "folder"])
@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"reward_model.style.name": "gold"}, "rule"),
        ({"reward_model.style": "gold"}, {"name": "rule"}),
        ({"choices.1": "gold"}, "b"),
        ({"answers.text.0": "gold"}, "x"),
        ({"a.b": "gold"}, "dotted"),
        ({"nothing.of.this": "gold"}, None),
    ],
)
def test_a_path_gives_what_is_within_a_column_a_name(tmp_path: Path, name, rename, expected):
    path = tmp_path / name
    if name == "rows.jsonl":
        write_lines(path, [json.dumps(ROW)] * 3)
    else:  # a folder is a Hugging Face data set
        file = path / "train.parquet" if name == "folder" else path
        file.parent.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist([ROW] * 3), file)
    table = open_table(str(path), "train", rename, "prompt", "prompts.path")
    try:
        row = table.row(2)
    finally:
        table.close()
    assert row["gold"] == expected and row["prompt"] == "q"
    if "a.b" not in rename:  # only what is within a column is named, and the column stays
        assert row["reward_model"] == ROW["reward_model"]


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"reward_model.truth": "gold"}, r"reward_model has no 'truth', got keys \['ground_truth'"),
        ({"reward_model.style.name.x": "gold"}, r"style\.name has no 'x', got 'rule'"),
        ({"choices.2": "gold"}, r"choices has no '2', got \['a', 'b'\]"),
        ({"q": "gold"}, "prompts.rename names the column 'q', which does not exist"),
        ({"reward_model.ground_truth": "choices"}, r"would overwrite the column 'choices'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path, rename, message):
    path = write_lines(tmp_path / "rows.jsonl", [json.dumps(ROW)])
    with pytest.raises(ValueError, match=message):
        open_table(path, "train", rename, "prompt", "prompts.path")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
@pytest.mark.parametrize(
    ("split", "first", "end"),
    [("train", 0, 23), ("train[:5]", 0, 5), ("train[5:]", 5, 23), ("[-3:]", 20, 23), ("train[4:9]", 4, 9), ("[:99]", 0, 23)],
)  # fmt: skip
def test_rows_in_brackets_are_a_part_of_any_table(tmp_path: Path, kind, split, first, end):
    path = tmp_path / f"p.{kind}"
    if kind == "folder":
        path.mkdir()
        pq.write_table(pa.Table.from_pylist(ROWS), path / "train-00000-of-00001.parquet")
        split = split if split.startswith("train") else f"train{split}"
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=4)
    else:
        write_lines(path, [json.dumps(row) for row in ROWS])
    table = open_table(str(path), split, {}, "prompt", "prompts.path")
    expected = ROWS[first:end]
    assert [table.row(i) for i in range(len(table))] == expected
    assert [*table.rows(1, len(table))] == expected[1:]
    assert table.where(0).endswith(f":{first + 1}" if kind == "jsonl" else f"row {first}")


def test_a_part_without_rows_is_refused(tmp_path: Path):
    path = write_lines(tmp_path / "p.jsonl", ['{"prompt": "a"}'])
    with pytest.raises(ValueError, match=r"train\[5:\], contains no prompts"):
        open_table(path, "train[5:]", {}, "prompt", "prompts.path")
