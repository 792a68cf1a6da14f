# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Writes docs/metrics.md from the tables in `torchtitan/grpo/observe/metric_docs/`.

usage: python scripts/make_metrics_doc.py [--check]
With --check nothing is written, and the exit status is 1 if the page is out of date.
"""

import sys
from pathlib import Path

from torchtitan.grpo.observe.metric_docs import SECTIONS, Metric, Section

REPOSITORY = Path(__file__).resolve().parents[1]
TARGET = REPOSITORY / "docs/metrics.md"

HEAD = """# Metrics

`metrics.jsonl` in `job.dump_folder` has one record for each step, and `evaluations.jsonl` one for each evaluation. Numbers have
seven digits. A key is a path and ends in its unit where it has one. A metric that is absent does not apply to the run.

**wandb and TensorBoard.** `metrics.enable_wandb = true` and `metrics.enable_tensorboard = true` send the same keys there, in every
step (`metrics.log_freq`), from rank 0. The step's samples go along: a table `samples` in wandb, a text in TensorBoard; each has the
context with its turns, the reward with its components, the advantage, and the data set's columns. Without an API key, wandb writes
to a folder in `job.dump_folder` (offline mode), which `wandb sync FOLDER` uploads later. `WANDB_PROJECT`, `WANDB_RUN_NAME` and wandb's
other variables apply. `tensorboard --logdir outputs/run` shows the metrics in TensorBoard.

**The line of a step.** On a terminal the line fits into 80 columns:

    12/150 rew 0.512 ent 0.51 len 11.2 age 0.75 gen/trn 12k/9876 trn waits 45%

These are the step, `reward/mean`, `policy/entropy`, `rollout/completion_tokens_mean`, `staleness/mean_steps`, generated and trained
tokens per second (`rollout/tokens_per_second`, `time/trained_tokens_per_second`), and who waits: `trn waits` is
`time/wait_data_fraction`, `gen waits` is `rollout/wait_trainer_fraction`; the larger of the two is shown. In files, in pipes, and on wide terminals the
same fields have whole words. What was left out since the last step follows, where it is not 0.

**Metrics of your own.** A reward function adds `reward/<its name>`: the mean of its values. A policy loss of your own adds the
metrics that it returns, whose names begin with `loss/` and which are reduced as it says
([add-a-loss](how-to/add-a-loss.md)). Such metrics are written, shown and sent like all others.

**Samples.** `samples.jsonl` holds `observe.samples_per_step` rollouts of each step. Its `context` is the whole text with special tokens, in parts
that say who wrote them (`prompt`, `model`, `environment`, `older model`) and whether they are trained. `advantage` is null for
a rollout that is not trained, and if the KL penalty is part of the reward (`grpo.kl_in = "reward"`), which is added later.
`columns` are those of the data set, cut after 2000 characters.

This page is made by `python scripts/make_metrics_doc.py` from `torchtitan/grpo/observe/metric_docs/`.
"""


def page() -> str:
    """Returns the whole page."""
    return "\n".join([HEAD, *map(section, SECTIONS)])


def section(described: Section) -> str:
    """Returns the metrics of one subject as a section with a table."""
    lines = [f"## {described.title}", "", described.text, ""]
    lines += ["| metric | unit | meaning | healthy | otherwise |", "|---|---|---|---|---|"]
    lines += [row(metric) for metric in described.metrics]
    return "\n".join(lines) + "\n"


def row(metric: Metric) -> str:
    """Returns one row of a table."""
    cells = [f"`{metric.key}`", metric.unit, metric.meaning, metric.healthy, metric.otherwise]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text() != page())
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
