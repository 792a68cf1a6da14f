# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Text with a byte-order mark is read, and what is no text in UTF-8 is named with the remedy."""

import codecs
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchtitan.grpo.commands.verify import read_prompts
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.data.ptx import _rows
from torchtitan.grpo.inference.urls import read_urls
from torchtitan.grpo.rollout.tables import open_table
from torchtitan.grpo.system.errors import DataError

MARK = codecs.BOM_UTF8
ROWS = [{"prompt": f"é{i}", "completion": "x", "answer": "1"} for i in range(300)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
TEXT = LINES.encode()
TOML = b"[grpo]\ngroup_size = 4\n"


def parquet(rows: list[dict[str, str]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


OTHER_FORMATS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "gzip": (gzip.compress, "compressed with gzip. Unpack it: gunzip -c"),
    "utf16": (lambda text: text.decode().encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "latin1": (
        lambda text: text.replace(b"group", b"grou\xe9p").replace("é".encode(), b"\xe9"),
        "iconv -f ISO-8859-1 -t UTF-8",
    ),
    "nul": (lambda text: text[:20] + bytes(30) + text[20:], "control characters (byte 0x00)"),
    "html": (lambda text: b"<!DOCTYPE html><html>" + text, "a page of HTML"),
    "lfs": (lambda text: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}
READERS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "prompts": (lambda path: table(path), ValueError, "prompts.path"),
    "evaluation": (lambda path: table(path, "evaluation.path"), ValueError, "evaluation.path"),
    "ptx": (lambda path: list(_rows(str(path))), DataError, "grpo.ptx_path"),
    "urls": (lambda path: read_urls(path), ValueError, "inference.urls_file"),
    "config": (lambda path: read_config(["--job.config_file", str(path)]), ConfigError, "config"),
}


def table(path: Path, key: str = "prompts.path") -> list[object]:
    rows = open_table(str(path), "train", {}, "prompt", key)
    try:
        return [rows.row(i) for i in range(len(rows))]
    finally:
        rows.close()


@pytest.mark.parametrize(
    ("form", "reader"),
    [(form, "prompts") for form in OTHER_FORMATS]
    + [(form, reader) for form in ("gzip", "latin1") for reader in READERS if reader != "prompts"],
)
def test_another_format_is_named_with_the_remedy(form, reader, tmp_path: Path):
    write, message = OTHER_FORMATS[form]
    read, error, key = READERS[reader]
    path = tmp_path / "file.jsonl"
    path.write_bytes(write(TOML if reader == "config" else TEXT))
    with pytest.raises(error) as refused:
        read(path)
    assert message in str(refused.value)
    assert key in str(refused.value) and str(path) in str(refused.value)


NOT_LINES = {
    "array": (json.dumps(ROWS).encode(), "one JSON array"),
    "indented": (json.dumps(ROWS[0], indent=1).encode(), "each object must be on one line"),
    "no_newlines": (TEXT.replace(b"\n", b""), "each object must be on one line"),
    "python": (b"{'prompt': 'a'}\n", "double quotes"),
    "text": (b"12 plus 3\n4 plus 5\n", "plain text or a table"),
    "csv": (b"prompt,answer\na,1\nb,2\n", "separated values"),
    "commas": (TEXT.replace(b"}\n", b"},\n"), "it ends with a comma"),
    "trailing_comma": (b'{"prompt": "a",}\n', "trailing comma"),
    "nan": (b'{"prompt": "a", "answer": NaN}\n', "Write null"),
    "parquet": (parquet(ROWS), "a parquet file. Rename it so that its name ends in .parquet"),
}


@pytest.mark.parametrize(
    ("form", "ending"),
    [*((form, ".jsonl") for form in NOT_LINES), ("csv", ".json"), ("csv", ".txt")],
)
def test_what_is_not_one_object_on_each_line_is_named(form, ending, tmp_path: Path):
    content, message = NOT_LINES[form]
    path = tmp_path / f"file{ending}"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        table(path)
    assert str(refused.value).startswith(f"{path}:1: every line of prompts.path must be a JSON")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXT, "it is JSON. Rename it so that its name ends in .jsonl"),
        (gzip.compress(TEXT), "gunzip -c"),
        (b"prompt,answer\na,1\n", "separated values"),
        (parquet(ROWS)[:-30], "Parquet"),
        (b"", "0 bytes"),
    ],
)
def test_what_is_no_parquet_file_is_named(content, message, tmp_path: Path):
    path = tmp_path / "file.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"prompts\.path: .*cannot be read as parquet") as refused:
        table(path)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("begin", "newline"),
    [(MARK, b"\n"), (MARK, b"\r\n"), (MARK + b" \r\n\n", b"\n"), (MARK * 2, b"\n"), (b"\n", b"\n")],
)
def test_a_byte_order_mark_is_passed_over(begin, newline, tmp_path: Path):
    path = tmp_path / "file.jsonl"
    body = TEXT.replace(b"\n", newline)
    path.write_bytes(begin.replace(MARK * 2, MARK) + body + newline + MARK + body)  # joined by cat
    assert table(path) == [*ROWS, *ROWS]
    if not begin.endswith(b"\n"):
        prompts = [row["prompt"] for _, row in _rows(str(path))]
        assert prompts[:300] == [row["prompt"] for row in ROWS]
        assert read_prompts(path, 3) == ["é0", "é1", "é2"]


@pytest.mark.parametrize("content", [b"", MARK + b"\r\n", b" \t\n"])
def test_a_file_without_a_row_is_named_as_such(content, tmp_path: Path):
    path = tmp_path / "file.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"prompts\.path: .*file\.jsonl contains no prompts"):
        table(path)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_settings_and_addresses_may_begin_with_a_byte_order_mark(newline, tmp_path: Path):
    config, urls = tmp_path / "x.toml", tmp_path / "urls"
    config.write_bytes(MARK + TOML.replace(b"\n", newline))
    urls.write_bytes(MARK + b"http://127.0.0.1:1" + newline)
    assert read_config(["--job.config_file", str(config)]).grpo.group_size == 4
    assert read_urls(urls) == ["http://127.0.0.1:1"]
