# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tables of prompts, read row by row: JSONL, parquet and Hugging Face data sets.

A *row* is here a row of such a table, and its rows are not held in memory. In reading order:
`table` (the interface), `opening`, `jsonl` with `line_index`, `parquet`, `hf_dataset`.
"""

from torchtitan.grpo.rollout.tables.opening import open_table
from torchtitan.grpo.rollout.tables.table import RowError, Table

__all__ = ["RowError", "Table", "open_table"]
