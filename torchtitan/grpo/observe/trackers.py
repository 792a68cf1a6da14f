# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What this project adds to upstream's wandb and TensorBoard loggers."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    TensorBoardLogger,
    WandBLogger,
)
from torchtitan.distributed import ParallelDims

from torchtitan.grpo import strict_json
from torchtitan.grpo.observe.sample_log import sample_text

SAMPLES = "samples"
"""Name of the table in wandb, and of the text in TensorBoard."""

COLUMNS = (
    "step",
    "group_id",
    "prompt",
    "completion",
    "context",
    "reward",
    "advantage",
    "reward_components",
    "columns",
    "finish_reason",
)


def without_pipeline(parallel_dims: ParallelDims) -> ParallelDims:
    """Returns a copy under which upstream opens its loggers on rank 0.

    Rank 0 has all metrics here, whichever stage of a pipeline it holds.
    """
    view = copy.copy(parallel_dims)
    view.pp = 1
    return view


def log_samples(tracker: BaseLogger, samples: Sequence[Mapping[str, Any]], step: int) -> None:
    """Logs records of ``samples.jsonl`` as a table in wandb and as text in TensorBoard."""
    if not samples:
        return
    for one in _loggers(tracker):
        if isinstance(one, WandBLogger):
            table = one.wandb.Table(columns=list(COLUMNS), data=[_row(s) for s in samples])
            one.wandb.log({SAMPLES: table}, step=step)
        elif isinstance(one, TensorBoardLogger):
            # Markdown shows indented lines as they are.
            text = "\n\n".join(sample_text(sample) for sample in samples)
            one.writer.add_text(SAMPLES, "    " + text.replace("\n", "\n    "), step)


def _loggers(tracker: BaseLogger) -> Iterator[BaseLogger]:
    if isinstance(tracker, LoggerContainer):
        yield from tracker._loggers  # upstream has no other way to them
    else:
        yield tracker


def _row(sample: Mapping[str, Any]) -> list[Any]:
    """Returns a table's row. A column of a table has one type, so that nested values are text."""
    context = "\n".join(
        f"[{turn['role']}{', trained' if turn['trained'] else ''}] {turn['text']}"
        for turn in sample["context"]
    )
    values = {**sample, "context": context}
    return [_cell(values[name]) for name in COLUMNS]


def _cell(value: Any) -> Any:
    return strict_json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
