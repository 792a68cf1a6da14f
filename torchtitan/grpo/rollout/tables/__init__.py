# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tables of prompts: JSONL files, parquet files and Hugging Face data sets.

Their rows are not held in memory.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from torchtitan.grpo.rollout.tables.arrow import HfDatasetTable, ParquetTable
from torchtitan.grpo.rollout.tables.jsonl import JsonlTable
from torchtitan.grpo.rollout.tables.table import PartTable, RowError, Table
from torchtitan.grpo.system.files import check_folder, check_regular

__all__ = ["RowError", "Table", "open_table"]


def open_table(
    path: str,
    split: str,
    rename: Mapping[str, str],
    column: str | None,
    key: str,
    name: str | None = None,
) -> Table:
    """Opens a file or a Hugging Face data set.

    ``name`` is the configuration of a data set. After renaming, rows must have the prompt column
    ``column``, unless it is ``None``. ``key`` is the TOML key of ``path``, for messages.
    """
    if not path:
        raise ValueError(
            f"{key} must be the path of a .jsonl or .parquet file or a Hugging Face data set, "
            "got ''."
        )
    file = Path(path)
    if path.endswith((".jsonl", ".json", ".parquet")) and not file.exists():
        raise ValueError(
            f"{key}: {path} cannot be read: the file does not exist. A relative path starts at "
            f"{Path.cwd()}."
        )
    try:
        if file.is_dir():
            check_folder(file, below=True)
        elif file.exists():
            check_regular(file)
    except OSError as error:
        raise ValueError(f"{key}: {error}.") from error
    # As Hugging Face writes rows of a split: train[:200], train[200:].
    part = re.fullmatch(r"(\w*)\[(-?\d+)?:(-?\d+)?\]", split)
    split = part[1] if part else split
    if path.endswith(".parquet") and file.is_file():
        table: Table = ParquetTable(path, rename, column, key)
    elif path.endswith((".jsonl", ".json")) or file.is_file():
        table = JsonlTable(path, rename, column, key)
    else:
        table = HfDatasetTable(path, split, rename, column, key, name)
    table = PartTable(table, part.groups()[1:]) if part else table
    if len(table) == 0:
        table.close()
        where = f"{path}, {part[0]}," if part else path
        raise ValueError(f"{key}: {where} contains no prompts. Use a file with at least one row.")
    return table
