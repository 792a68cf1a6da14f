# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Costs and lengths that were measured in an earlier run: ``--from RUN_FOLDER``."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.grpo.commands.forecast import hardware
from torchtitan.grpo.commands.forecast.system import Costs, Lengths
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.observe.run_log import read_records
from torchtitan.grpo.rollout.serving.server_state import COMPLETIONS_METRIC, SPEED_METRICS
from torchtitan.grpo.run_folder.contents import STARTS_FOLDER

Step = dict[str, Any]
_PUSH_RATE = "weight_sync/server0/gb_per_second"
_TOKENS = "rollout/completion_tokens_mean"
_SHARED = "time/shared_tokens_fraction"
_FEWEST_STEPS = 5
_WARM_UP = 0.2  # part of the steps
# Standard error of a token's training time above which it is not believed, as a part of the time of a
# token if tokens take all of the time.
_DOUBT = 0.25
_PROPORTIONAL = "depends on its tokens: all of it is taken as proportional to them"


@dataclass(frozen=True)
class Measured:
    """What was measured in a run with ``num_ranks`` ranks and ``num_servers`` servers.

    ``waited`` is the fraction of time in which training waited for rollouts. ``waits`` holds the fractions
    in which rollouts waited for rewards and for episodes. ``assumed`` names the costs of lending that the
    run did not measure, and ``doubts`` says in sentences what else it did not measure.
    """

    config: JobConfig
    costs: Costs
    assumed: Sequence[str]
    doubts: Sequence[str]
    lengths: Lengths
    prompt_tokens: float
    dropped: float
    num_ranks: int
    num_servers: int
    num_steps: int
    samples_per_second: float
    waited: float
    waits: dict[str, float]


def read_run(folder: Path) -> Measured:
    """Reads the measurements of a run; raises ConfigError if the folder holds no run, or too short a run."""
    files = (folder / STARTS_FOLDER).glob("[0-9]*/config.toml")
    start = max(files, key=lambda file: int(file.parent.name), default=None)
    if start is None:
        raise ConfigError(f"--from must name the folder of a run (job.dump_folder), got {folder}.")
    config = read_config(["--job.config_file", str(start)])
    environment = json.loads(start.with_name("environment.json").read_text())
    # Earlier starts may have had other settings and devices.
    found = _records(folder / "metrics.jsonl", are_metrics=True)
    steps = {r["step"]: r for r in found if r["step"] >= environment["first_step"]}
    records = [steps[step] for step in sorted(steps)]
    if len(records) < _FEWEST_STEPS:
        raise ConfigError(
            f"--from needs metrics of at least {_FEWEST_STEPS} steps of the run's last start, got "
            f"{len(records)} in {folder}. Let the run continue, or leave --from out."
        )
    used = records[int(_WARM_UP * len(records)) :]
    servers = _servers(used[-1], folder)
    # A step that waits for its push has it in its time.
    pushing = () if config.grpo.async_weight_update else ("time/boundary_stall_seconds",)
    costs, doubts = _costs(used, servers, ("time/wait_data_seconds", *pushing))
    loans = _loans(used)
    samples = config.grpo.prompts_per_step * config.grpo.group_size
    tokens = statistics.fmean(map(_tokens, used)) / samples
    return Measured(
        config, replace(costs, **loans), [name for name in hardware.LENDING if name not in loans], doubts,
        _lengths(folder, config, used),
        prompt_tokens=max(0.0, tokens - _mean(used, _TOKENS)),
        dropped=_dropped(used, config.grpo.prompts_per_step),
        num_ranks=environment["num_ranks"], num_servers=len(servers), num_steps=len(used),
        samples_per_second=samples / (seconds := _mean(used, "time/step_seconds")),
        waited=_mean(used, "time/wait_data_seconds") / seconds,
        waits={
            "rewards": _median(used, "rollout/wait_rewards_fraction"),
            "episodes": _median(used, "rollout/wait_episodes_fraction"),
        },
    )  # fmt: skip


def _costs(
    records: Sequence[Step], servers: np.ndarray, waiting: Sequence[str]
) -> tuple[Costs, list[str]]:
    """Returns costs, and sentences on what the run did not measure. The costs of lending are assumed ones.

    ``waiting`` names the metrics of those parts of a step's time in which nothing is trained.
    """
    doubts = []
    request, token, beside = servers[:, 1:].T
    if (is_unknown := (token == 0) & (beside == 0)).any():
        doubts.append(f"the run does not tell how a completion's time {_PROPORTIONAL}")
        token = np.where(is_unknown, request / _mean(records, _TOKENS), token)
        request = np.where(is_unknown, 0.0, request)
    share = servers[:, 0] / servers[:, 0].sum()
    train, train_token, is_known = _training(records, waiting)
    if not is_known:
        doubts.append(f"the run does not tell how training time {_PROPORTIONAL}")
    gather, push = (_median(records, f"weight_sync/{name}_seconds") for name in ("gather", "push"))
    rate = _median(records, _PUSH_RATE, math.inf)
    costs = Costs(
        *(float(share @ cost) for cost in (token, beside, request)), train=train, train_token=train_token,
        push=gather + push,
        transfer=_median(records, "weight_sync/push_bytes") / 1e9 / rate,
        reward=_median(records, "rollout/scoring_seconds"),
        room=hardware.ROOM_SECONDS, wake=hardware.WAKE_SECONDS + gather + push, sleep=hardware.SLEEP_SECONDS,
    )  # fmt: skip
    return costs, doubts


def _loans(records: Sequence[Step]) -> dict[str, float]:
    """Median seconds of each phase of lending devices (making room, waking, sleeping) that the run measured.

    The metrics are 0 in steps without a loan, and waking also if the batch was complete before it ended.
    """
    found = {}
    lent = [record for record in records if record.get("lend/wakes")]
    for name, metric in hardware.LENDING.items():
        seconds = [record[metric] / record["lend/wakes"] for record in lent if record.get(metric)]
        if seconds:
            found[name] = statistics.median(seconds)
    return found


def _records(file: Path, *, are_metrics: bool = False) -> list[Step]:
    lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else ()
    return [record for _, record in read_records(file, lines, are_metrics=are_metrics)]


def _mean(records: Sequence[Step], key: str) -> float:
    return statistics.fmean(record[key] for record in records)


def _median(records: Sequence[Step], key: str, default: float = 0.0) -> float:
    values = [record[key] for record in records if record.get(key) is not None]
    return statistics.median(values) if values else default


def _servers(record: Step, folder: Path) -> np.ndarray:
    """[servers, 4]: completions and three fitted costs of each server that completed enough for a fit."""
    last = f"/{COMPLETIONS_METRIC}"
    names = [k.removesuffix(last) for k in record if k.startswith("servers/") and k.endswith(last)]
    if not names:
        raise ConfigError(
            f"--from needs a run whose servers were measured (servers/*{last} in metrics.jsonl), got "
            f"{folder}. Let a run generate for some steps with this version, or leave --from out."
        )
    metrics = (COMPLETIONS_METRIC, *SPEED_METRICS)
    return np.array([[record[f"{name}/{metric}"] for metric in metrics] for name in names])


def _tokens(record: Step) -> float:
    """Tokens of a batch, including the groups that grpo.filter_zero_advantage leaves out."""
    kept = 1 - record.get("data/filtered_groups_fraction", 0.0)
    return record["time/tokens_per_second"] * record["time/step_seconds"] / (kept or 1.0)


def _training(records: Sequence[Step], waiting: Sequence[str]) -> tuple[float, float, bool]:
    """Fits seconds per step and per token to training time, and returns whether the two can be told apart.

    They cannot if batches have nearly the same size. Then all of the time is taken as proportional to tokens.
    """
    tokens = np.array([_tokens(r) * (1 - r.get(_SHARED, 0.0)) for r in records])
    waits = [sum(record[key] for key in waiting) for record in records]
    seconds = np.array([record["time/step_seconds"] for record in records]) - waits
    most = seconds.mean() / tokens.mean()  # for a token
    deviations = tokens - tokens.mean()
    slope, error = most, math.inf
    if squares := deviations @ deviations:
        slope = deviations @ seconds / squares
        residuals = seconds - seconds.mean() - slope * deviations
        error = math.sqrt(residuals @ residuals / (len(records) - 2) / squares)
    is_known = error <= _DOUBT * most
    if not is_known or slope >= most:
        return 0.0, float(most), is_known
    token = max(0.0, float(slope))
    return float(seconds.mean() - token * tokens.mean()), token, True


def _lengths(folder: Path, config: JobConfig, records: Sequence[Step]) -> Lengths:
    """Estimates completion lengths: their shape from logged samples, mean and truncated part from all."""
    limit, mean = config.rollout.max_new_tokens, _mean(records, _TOKENS)
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
