# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Opens the table for a path in the configuration."""

from collections.abc import Mapping
from pathlib import Path

from torchtitan.grpo.rollout.tables.hf_dataset import HfDatasetTable
from torchtitan.grpo.rollout.tables.jsonl import JsonlTable
from torchtitan.grpo.rollout.tables.parquet import ParquetTable
from torchtitan.grpo.rollout.tables.table import Table
from torchtitan.grpo.system.files import check_folder, check_regular


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
        path: A ``.jsonl`` or ``.parquet`` file, or the name or directory of a Hugging Face data
            set. A directory of parquet files counts as a data set.
        split: Split of a Hugging Face data set.
        rename: Columns renamed before use, from old to new name.
        column: The prompt column, after renaming.
        key: TOML key of ``path``, for messages.
        name: Configuration name of a Hugging Face data set that has several.

    Raises:
        ValueError: If the table cannot be used. The message names ``key``.
    """
    if not path:
        raise ValueError(
            f"{key} must be the path of a .jsonl or .parquet file or a Hugging Face data set, "
            "got ''."
        )
    if path.endswith((".jsonl", ".json", ".parquet")) and not Path(path).exists():
        raise ValueError(
            f"{key}: {path} cannot be read: the file does not exist. A relative path starts at "
            f"{Path.cwd()}."
        )
    is_directory = Path(path).is_dir()
    _check_files(Path(path), key)
    if path.endswith(".parquet") and not is_directory:
        table: Table = ParquetTable(path, rename, column, key)
    elif path.endswith((".jsonl", ".json")) or Path(path).is_file():
        table = JsonlTable(path, rename, column, key)
    else:
        table = HfDatasetTable(path, split, rename, column, key, name)
    if len(table) == 0:
        table.close()
        raise ValueError(f"{key}: {path} contains no prompts. Use a file with at least one row.")
    return table


def _check_files(path: Path, key: str) -> None:
    """Refuses what is no regular file, also below a directory that is read as a data set."""
    try:
        if path.is_dir():
            check_folder(path, below=True)
        elif path.exists():
            check_regular(path)
    except OSError as error:
        raise ValueError(f"{key}: {error}.") from error
