# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A Hugging Face data set as a table."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.grpo.rollout.tables.table import (
    RowError,
    Table,
    check_column,
    renamed,
    renamed_or_error,
)

_SLICE_ROWS = 256


class HfDatasetTable(Table):
    """A split of a Hugging Face data set: saved to disk, in local files, or from the hub."""

    def __init__(
        self,
        path: str,
        split: str,
        rename: Mapping[str, str],
        column: str,
        key: str,
        name: str | None = None,
    ) -> None:
        self.path = f"{path} (split {split!r})"
        self._rename = dict(rename)
        self._dataset = _load_dataset(path, name, split, key)
        names = dict.fromkeys(self._dataset.column_names)
        check_column(renamed(names, self._rename, self.path), column, self.path)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, i: int) -> dict[str, Any]:
        return renamed(self._dataset[i], self._rename, self.where(i))

    def rows(self, first: int, end: int) -> Iterator[dict[str, Any] | RowError]:
        for begin in range(first, end, _SLICE_ROWS):
            # A slice is a dictionary of columns, and is decoded much faster than single rows.
            columns = self._dataset[begin : min(begin + _SLICE_ROWS, end)]
            for i, values in enumerate(zip(*columns.values(), strict=True), start=begin):
                row = dict(zip(columns, values, strict=True))
                yield renamed_or_error(row, self._rename, self.where(i))

    def where(self, i: int) -> str:
        return f"{self.path}, row {i}"


def _load_dataset(path: str, name: str | None, split: str, key: str) -> Any:
    # Imported here, because it is slow to import and not needed for files.
    import datasets

    try:
        if (Path(path) / "dataset_dict.json").is_file() or (Path(path) / "state.json").is_file():
            loaded = datasets.load_from_disk(path)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(path, name, split=split)
    except Exception as error:  # the library raises many types of errors, for files and network
        named = f"configuration {name!r} and " if name else ""
        raise ValueError(
            f"{key}: {path!r} is neither a readable .jsonl or .parquet file nor a Hugging Face "
            f"data set with {named}split {split!r}: {type(error).__name__}: {error}"
        ) from error
