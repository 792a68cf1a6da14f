# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Opens upstream's wandb and TensorBoard loggers, and logs samples to them.

The loggers are imported inside functions, because they import TensorBoard, which few runs use.
"""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.observe.sample_log import group_texts
from torchtitan.grpo.run_folder.contents import WANDB_ID_FILE
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.system.logs import logger

if TYPE_CHECKING:
    from torchtitan.grpo.upstream.metrics import BaseLogger

SAMPLES = "samples"
"""Name of the table in wandb, and of the text in TensorBoard."""

COLUMNS = (
    *("step", "group_id", "prompt", "completion", "context", "reward", "unscored"),
    *("advantage", "reward_components", "columns", "finish_reason", "logged"),
)


def open_trackers(config: JobConfig) -> "list[BaseLogger]":
    """Opens the loggers of ``[metrics]`` on rank 0, which has all metrics. wandb is left out if it fails."""
    settings = config.metrics
    if dist.get_rank() != 0 or not (settings.enable_wandb or settings.enable_tensorboard):
        return []
    from torchtitan.grpo.upstream.metrics import TensorBoardLogger, WandbConfig, WandBLogger

    trackers: list[BaseLogger] = []
    begin = datetime.now().strftime("%Y%m%d-%H%M")
    folder = os.path.join(config.job.dump_folder, settings.save_tb_folder, begin)
    if settings.enable_wandb:
        try:
            with wandb_run(config):
                trackers.append(WandBLogger(folder, WandbConfig(config.to_dict())))  # pyright: ignore
        except Exception as error:  # also of the libraries below wandb: no run ends for a curve
            logger.error(f"wandb cannot be opened, and the run goes on without it: {error}")
    if settings.enable_tensorboard:
        trackers.append(TensorBoardLogger(folder))
    return trackers


@contextmanager
def wandb_run(config: JobConfig) -> Iterator[None]:
    """Context in which a resumed run opens its earlier wandb run, unless environment variables name one.

    Environment variables are set only inside this context, because user code may use wandb too.
    """
    named = ("WANDB_RUN_ID", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")
    if any(os.environ.get(name) for name in named):
        yield
        return
    file = Path(config.job.dump_folder) / f"{WANDB_ID_FILE}{dist.get_rank()}"
    before = {name: os.environ.get(name) for name in ("WANDB_RUN_ID", "WANDB_RESUME")}
    kept = file.read_text().strip() if file.is_file() else ""
    os.environ["WANDB_RUN_ID"] = kept or secrets.token_hex(4)
    os.environ["WANDB_RESUME"] = before["WANDB_RESUME"] or "allow"
    try:
        yield
        if not kept:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(os.environ["WANDB_RUN_ID"] + "\n")
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def wandb_place(trackers: "Sequence[BaseLogger]") -> str | None:
    if not trackers:
        return None
    from torchtitan.grpo.upstream.metrics import WandBLogger

    for one in trackers:
        if isinstance(one, WandBLogger) and (run := one.wandb.run) is not None:
            folder = Path(run.dir).parent
            end = f": upload them with `wandb sync {folder}`" if run.offline else f" ({run.url})"
            return f"wandb's files are in {folder}{end}."
    return None


def log_samples(
    trackers: "Sequence[BaseLogger]", samples: Sequence[Mapping[str, Any]], step: int
) -> None:
    """Logs samples as a table in wandb and as text in TensorBoard."""
    if not (samples and trackers):
        return
    from torchtitan.grpo.upstream.metrics import TensorBoardLogger, WandBLogger

    for one in trackers:
        if isinstance(one, WandBLogger):
            table = one.wandb.Table(columns=list(COLUMNS), data=[_row(s) for s in samples])
            one.wandb.log({SAMPLES: table}, step=step)
        elif isinstance(one, TensorBoardLogger):
            # Markdown shows indented lines as they are.
            text = "\n\n".join(group_texts(samples))
            one.writer.add_text(SAMPLES, "    " + text.replace("\n", "\n    "), step)


def _row(sample: Mapping[str, Any]) -> list[Any]:
    """Returns a row of wandb's table. Nested values become text, as each column must have one type."""
    context = "\n".join(
        f"[{turn['role']}{', trained' if turn['trained'] else ''}] {turn['text']}"
        for turn in sample["context"]
    )
    values = [{**sample, "context": context}[name] for name in COLUMNS]
    return [
        strict_json.dumps(v, ensure_ascii=False) if isinstance(v, dict | list) else v
        for v in values
    ]
