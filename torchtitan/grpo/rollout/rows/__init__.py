# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tables of prompts, read row by row: JSONL, parquet, Hugging Face data sets.

Rows are not held in memory. In reading order: `table` (what all have), `opening`, `jsonl` with
`lines` and `row_check`, `parquet`, `dataset`.
"""

from torchtitan.grpo.rollout.rows.opening import open_rows
from torchtitan.grpo.rollout.rows.table import Rows

__all__ = ["Rows", "open_rows"]
