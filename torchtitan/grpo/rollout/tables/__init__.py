# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tables of prompts, read row by row: JSONL, parquet, Hugging Face data sets.

Rows are not held in memory. In reading order: `table` (what all have), `opening`, `jsonl` with
`lines` and `row_check`, `parquet`, `dataset`.
"""

from torchtitan.grpo.rollout.tables.opening import open_table
from torchtitan.grpo.rollout.tables.table import Table

__all__ = ["Table", "open_table"]
