# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Costs and lengths that were measured in an earlier run: ``--from RUN_FOLDER``."""

import json
import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.grpo.command_line import ConfigError
from torchtitan.grpo.command_line.reading import read_config
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.plan import hardware
from torchtitan.grpo.plan.system import Costs, Lengths
from torchtitan.grpo.rollout.serving.server_state import SPEED_METRICS
from torchtitan.grpo.rollout.serving.speed_fit import SpeedFit
from torchtitan.grpo.run_folder.contents import STARTS_FOLDER

Step = dict[str, Any]
_PUSH_RATE = "weight_sync/server0/gb_per_second"
_FEWEST_STEPS = 5
_WARM_UP = 0.2  # part of the steps
# A step's own time, apart from its tokens', is believed if tokens vary by some percent.
_DOUBTS = (1e-3, 0.0)


@dataclass(frozen=True)
class Measured:
    """``num_ranks`` and ``num_servers`` are those with which ``costs`` were measured."""

    config: JobConfig
    costs: Costs
    lengths: Lengths
    prompt_tokens: float
    dropped: float
    num_ranks: int
    num_servers: int
    num_steps: int


def read_run(folder: Path) -> Measured:
    """Raises ConfigError if the folder holds no run, or one that is too short."""
    steps = {record["step"]: record for record in _records(folder / "metrics.jsonl")}
    records = [steps[step] for step in sorted(steps)]  # one that was taken again counts once
    files = (folder / STARTS_FOLDER).glob("[0-9]*/config.toml")
    starts = sorted(files, key=lambda file: int(file.parent.name))
    if len(records) < _FEWEST_STEPS or not starts:
        raise ConfigError(
            f"--from must name the folder of a run (job.dump_folder) with metrics of at least "
            f"{_FEWEST_STEPS} steps, got {folder}, which has {len(records)}."
        )
    config = read_config(["--job.config_file", str(starts[-1])])
    environment = json.loads(starts[-1].with_name("environment.json").read_text())
    used = records[int(_WARM_UP * len(records)) :]
    servers = _servers(used[-1], folder)
    samples = config.grpo.prompts_per_step * config.grpo.group_size
    tokens = _mean(used, "time/tokens_per_second", "time/step_seconds") / samples
    return Measured(
        config=config,
        costs=_costs(used, servers),
        lengths=_lengths(folder, config, used),
        prompt_tokens=max(0.0, tokens - _mean(used, "rollout/completion_tokens_mean")),
        dropped=_dropped(used, config.grpo.prompts_per_step),
        num_ranks=environment["num_ranks"],
        num_servers=len(servers),
        num_steps=len(used),
    )


def _costs(records: Sequence[Step], servers: list[list[float]]) -> Costs:
    request, token, beside = (statistics.fmean(costs) for costs in zip(*servers, strict=True))
    train, train_token = _training(records)
    gather, push = (_median(records, f"weight_sync/{name}_seconds") for name in ("gather", "push"))
    rate = _median(records, _PUSH_RATE, math.inf)
    return Costs(
        request=request,
        token=token,
        beside=beside,
        train=train,
        train_token=train_token,
        push=gather + push,
        transfer=_median(records, "weight_sync/push_bytes") / 1e9 / rate,
        room=_median(records, "lend/room_give_seconds", hardware.ROOM_SECONDS),
        wake=_median(records, "lend/wake_seconds", hardware.WAKE_SECONDS),
        sleep=_median(records, "lend/sleep_seconds", hardware.SLEEP_SECONDS),
    )


def _records(file: Path) -> list[Step]:
    found = []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        with suppress(ValueError):  # the last line of a killed run
            found.append(json.loads(line))
    return found


def _mean(records: Sequence[Step], *keys: str) -> float:
    """Of the product of the metrics."""
    return statistics.fmean(math.prod(record[key] for key in keys) for record in records)


def _median(records: Sequence[Step], key: str, default: float = 0.0) -> float:
    values = [record[key] for record in records if record.get(key) is not None]
    return statistics.median(values) if values else default


def _servers(record: Step, folder: Path) -> list[list[float]]:
    """The fitted costs of each server that has completed enough."""
    last = f"/{SPEED_METRICS[0]}"
    names = [k.removesuffix(last) for k in record if k.startswith("servers/") and k.endswith(last)]
    if not names:
        raise ConfigError(
            f"--from needs a run whose servers were measured (servers/*{last} in metrics.jsonl), got "
            f"{folder}. Let a run generate for some steps with this version, or leave --from out."
        )
    return [[record[f"{name}/{metric}"] for metric in SPEED_METRICS] for name in names]


def _training(records: Sequence[Step]) -> tuple[float, float]:
    """Seconds of a step apart from waiting, and of each of its tokens."""
    fit = SpeedFit(_DOUBTS)
    for record in records:
        step = record["time/step_seconds"]
        tokens = record["time/tokens_per_second"] * step
        fit.add((1.0, tokens), step - record["time/wait_data_seconds"])
    costs = fit.costs(fewest=1)
    assert costs is not None, "a run has at least one step"
    return costs[0], costs[1]


def _lengths(folder: Path, config: JobConfig, records: Sequence[Step]) -> Lengths:
    """Their shape is that of the samples that were written; their mean and what is cut, of all."""
    limit, mean = config.rollout.max_new_tokens, _mean(records, "rollout/completion_tokens_mean")
    lengths = (
        sum(end - start for _, start, end in sample["versions"])
        for sample in _records(folder / "samples.jsonl")
        if sample["step"] >= records[0]["step"]
    )
    ended = [length for length in lengths if 0 < length < limit]
    if len(ended) >= 4 * _FEWEST_STEPS:
        cut = _mean(records, "rollout/length_fraction")
        scale = (mean - cut * limit) / (1 - cut) / statistics.fmean(ended)
        return Lengths.measured([scale * length for length in ended], cut, limit)
    longest = _mean(records, "rollout/completion_tokens_max")
    # Of a hundred completions or so, the longest is about 2.5 standard deviations above the mean.
    return Lengths.lognormal(mean, max(0.0, longest - mean) / (2.5 * mean))


def _dropped(records: Sequence[Step], groups: int) -> float:
    kinds = ("filtered", "failed", "unscored", "unrated")
    lost = sum(record.get(f"rollout/{kind}_groups", 0.0) for record in records for kind in kinds)
    return lost / (lost + groups * len(records))
