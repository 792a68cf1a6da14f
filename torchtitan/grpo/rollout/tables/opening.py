# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""From a path in the configuration to its table."""

from collections.abc import Mapping
from pathlib import Path

from torchtitan.grpo.rollout.tables.hf_dataset import HfDatasetTable
from torchtitan.grpo.rollout.tables.jsonl import JsonlTable
from torchtitan.grpo.rollout.tables.parquet import ParquetTable
from torchtitan.grpo.rollout.tables.table import Table


def open_table(
    path: str,
    split: str,
    rename: Mapping[str, str],
    column: str,
    key: str,
    name: str | None = None,
) -> Table:
    """Opens a table and checks that it has rows with a prompt column.

    Args:
        path: A ``.jsonl`` or ``.parquet`` file, or the name or directory of a Hugging Face
            data set; a directory of parquet files is one as well.
        split: Split of a Hugging Face data set.
        rename: Columns renamed before use, old to new.
        column: The prompt column, after renaming.
        key: TOML key of ``path``, for messages.
        name: Configuration of a Hugging Face data set that has several.

    Raises:
        ValueError: Anything is wrong with the table; the message names ``key``.
    """
    if not path:
        raise ValueError(
            f"{key} must name a .jsonl or .parquet file or a Hugging Face data set, got ''."
        )
    is_directory = Path(path).is_dir()
    if path.endswith(".parquet") and not is_directory:
        rows: Table = ParquetTable(path, rename, column, key)
    elif path.endswith((".jsonl", ".json")) or Path(path).is_file():
        rows = JsonlTable(path, rename, column, key)
    else:
        rows = HfDatasetTable(path, split, rename, column, key, name)
    if len(rows) == 0:
        rows.close()
        raise ValueError(f"{key}: {path} holds no prompt. Give a file with at least one row.")
    return rows
