# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures the time to open a large prompt file, and the time to read one row afterwards.

    python benchmarks/prompts_open.py [--json] [--mib 256] [--prompt-bytes 300]

The benchmark writes a JSONL file of random prompts and a parquet file with the same rows. It
measures how long opening takes, which is building the index of the lines. It compares this time with
that of reading and parsing every line in Python, and with that of opening and reading every row, as
the check before training does. It also measures the time to read one row in random order. Times are
CPU seconds of one core. The files are in the page cache;
otherwise the disk could limit the speed. The exit status is 1 if opening is not at least 4 times as
fast as parsing every line in Python. With ``--json`` the last line is a JSON object.
"""

import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from figures import finish, make_parser

from torchtitan.grpo.rollout.tables import Table
from torchtitan.grpo.rollout.tables.arrow import ParquetTable
from torchtitan.grpo.rollout.tables.jsonl import JsonlTable, index_lines

LEAST_SPEED_UP = 4.0
ROUNDS = 5
RANDOM_ROWS = 1000
PARQUET_ROWS = 200_000
ROW_GROUPS = (1000, 20_000)
WORDS = ["the", "sum", "of", "all", "numbers", "that", "divide", "a", "given", "one", "how", "many"]


def make_rows(num_bytes: int, prompt_bytes: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    words = np.array(WORDS)
    written = 0
    while written < num_bytes:
        text = " ".join(rng.choice(words, size=max(1, int(rng.exponential(prompt_bytes / 5)))))
        row = {"prompt": text, "answer": str(int(rng.integers(10**6))), "level": 3}
        written += len(text) + 45
        yield row


def write_jsonl(path: Path, num_bytes: int, prompt_bytes: int) -> None:
    """Writes the same few MiB of rows repeatedly, because new rows would take longer."""
    rows = make_rows(min(num_bytes, 4 << 20), prompt_bytes)
    content = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    with path.open("wb") as file:
        for _ in range(max(1, round(num_bytes / len(content)))):
            file.write(content)


def best_seconds(work: Callable[[], object]) -> float:
    return min(seconds(work) for _ in range(ROUNDS))


def seconds(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of a call. They do not depend on other load, and no call waits."""
    began = time.process_time()
    work()
    return time.process_time() - began


def open_and_close(path: Path, *, reads_rows: bool) -> None:
    rows = JsonlTable(str(path), {}, "prompt", "prompts.path")
    if reads_rows:
        for _ in rows.rows(0, len(rows)):
            pass
    rows.close()


def parse_every_line(path: Path) -> None:
    """Reads and parses every line in Python, without numpy's index."""
    offsets, numbers, offset = array("q"), array("q"), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                if "prompt" not in msgspec.json.decode(line):
                    raise ValueError(where)
                offsets.append(offset)
                numbers.append(number)
            offset += len(line)


def index_alone(path: Path) -> int:
    with path.open("rb", buffering=0) as file:
        return len(index_lines(file)[0]) - 1


def seconds_of_a_row(rows: Table) -> float:
    order = np.random.default_rng(1).integers(len(rows), size=RANDOM_ROWS).tolist()
    return seconds(lambda: [rows.row(i) for i in order]) / RANDOM_ROWS


def measure_opening(path: Path) -> tuple[dict[str, float], bool]:
    num_bytes, num_lines = path.stat().st_size, index_alone(path)
    measured = {
        "index": best_seconds(lambda: index_alone(path)),
        "open": best_seconds(lambda: open_and_close(path, reads_rows=False)),
        "check_all": best_seconds(lambda: open_and_close(path, reads_rows=True)),
        "line_by_line": best_seconds(lambda: parse_every_line(path)),
    }
    print(f"{path.name}: {num_bytes / 2**20:.0f} MiB, {num_lines} lines")
    print(f"{'':36} {'seconds':>8} {'lines/s':>12} {'MiB/s':>8}")
    names = {
        "index": "index of the lines",
        "open": "open",
        "check_all": "open, and every row read",
        "line_by_line": "every line read and parsed by Python",
    }
    figures = {"mib": num_bytes / 2**20, "lines": float(num_lines)}
    for key, took in measured.items():
        figures[f"{key}_lines_per_second"] = num_lines / took
        print(
            f"{names[key]:36} {took:8.3f} {num_lines / took:12,.0f} {num_bytes / 2**20 / took:8.0f}"
        )
    figures["speed_up"] = measured["line_by_line"] / measured["open"]
    ok = figures["speed_up"] >= LEAST_SPEED_UP
    print(
        f"Opening is {figures['speed_up']:.1f} times as fast as parsing every line (must be >= "
        f"{LEAST_SPEED_UP:g}).",
        flush=True,
    )
    return figures, ok


def measure_rows(path: Path, folder: Path) -> dict[str, float]:
    jsonl = JsonlTable(str(path), {}, "prompt", "prompts.path")
    figures = {"jsonl": seconds_of_a_row(jsonl)}
    table = pa.Table.from_pylist([jsonl.row(i) for i in range(min(len(jsonl), PARQUET_ROWS))])
    jsonl.close()
    for group_size in ROW_GROUPS:
        file = folder / f"{group_size}.parquet"
        pq.write_table(table, file, row_group_size=group_size)
        # A cache for a twentieth of the rows shows how a file is read that is much larger than the
        # cache.
        for name, room in (("all_kept", 1 << 40), ("few_kept", table.nbytes // 20)):
            rows = ParquetTable(str(file), {}, "prompt", "prompts.path", cache_bytes=room)
            seconds_of_a_row(rows)
            figures[f"parquet_groups_of_{group_size}_{name}"] = seconds_of_a_row(rows)
            rows.close()
    for name, took in figures.items():
        print(f"{name:36} {1e6 * took:10.1f} us per row", flush=True)
    return {f"{name}_row_seconds": took for name, took in figures.items()}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the file")
    parser.add_argument("--prompt-bytes", type=int, default=300, help="mean length of a prompt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prompts-open-") as name:
        path = Path(name) / "prompts.jsonl"
        write_jsonl(path, options.mib << 20, options.prompt_bytes)
        figures, ok = measure_opening(path)
        figures |= measure_rows(path, Path(name))
    return finish(options, "prompts_open", ok, figures)


if __name__ == "__main__":
    sys.exit(main())
