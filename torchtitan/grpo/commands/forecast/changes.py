# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Changes that could make a run faster, each with all settings that it needs.

A change is simulated only if the run's own checks allow its settings, and if a run with these settings
has the servers that are simulated. Checks that look at the machine are left out.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.grpo.commands.forecast.search import Plan, Split, Spread, counted, spread
from torchtitan.grpo.commands.forecast.system import System
from torchtitan.grpo.config.cluster import count_servers, lent_groups, server_groups
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.environments import environments_of
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import environments, lending, ranges, rollouts, servers
from torchtitan.grpo.inference.urls import named_urls
from torchtitan.grpo.start.train import ranks_of_layout

_CHECKS = (
    ranges.check_ranges, rollouts.check_lengths, rollouts.check_stream, rollouts.check_determinism,
    servers.check_batched_tokens, lending.check_cluster, lending.check_lending,
)  # fmt: skip
_LEAST_GAIN = 0.01
_Row = tuple["Change", float, float]  # with the gain and its standard error


def check(config: JobConfig) -> None:
    """Raises ConfigError for settings with which a run would not start on any machine."""
    environments.check_tables(config)
    for own in environments_of(config).values():
        for check_part in _CHECKS:
            check_part(own)


def split_of(config: JobConfig, num_ranks: int, registered: int = 1) -> Split:
    """Returns the run's split. ``registered`` is the number of servers if the configuration names none."""
    lent = count_servers(lent_groups(config))
    number = count_servers(server_groups(config)) or len(named_urls(config.inference))
    return Split(num_ranks, (number or registered) - lent, lent)


@dataclass(frozen=True)
class Change:
    """A change of ``settings`` (by TOML key, or ``nproc``). ``more`` names other changes, ``note`` its price."""

    settings: Mapping[str, Any]
    split: Split
    note: str = ""
    more: str = ""

    @property
    def name(self) -> str:
        words = [
            f"{key} = {json.dumps(value, allow_nan=False)}" for key, value in self.settings.items()
        ]
        words = [word.replace("nproc =", "--nproc") for word in words]
        return ", ".join([self.more, *words] if self.more else words)

    @property
    def words(self) -> list[str]:
        """The settings as command-line arguments."""
        lists = {k: ",".join(v) for k, v in self.settings.items() if isinstance(v, list)}
        texts = {k: json.dumps(v, allow_nan=False) for k, v in self.settings.items()} | lists
        return [f"--{key}={text}" for key, text in texts.items()]


def allowed(
    plan: Plan, read: Callable[[Sequence[str]], JobConfig], found: Iterable[Change]
) -> Iterator[tuple[Change, System]]:
    """Yields the changes that pass the checks, and their systems. ``read`` reads the run with more arguments."""
    for change in found:
        config = read(change.words)
        try:
            check(config)
        except ConfigError:
            continue
        if decides(config, change.split):
            yield change, replace(plan.on(change.split), rollout=config.rollout)


def decides(config: JobConfig, split: Split) -> bool:
    """Whether the run would launch exactly the servers of the split, or launches none itself."""
    return not config.inference.launch or split_of(config, split.num_ranks) == split


def changes(plan: Plan, config: JobConfig) -> Iterator[Change]:
    """Yields changes of the settings and servers that decide how training and rollouts overlap."""
    rollout, split = config.rollout, plan.split
    older = {"rollout.max_head_offpolicyness": rollout.max_head_offpolicyness + 1}
    yield Change(older, split, "older samples")
    yield Change({"rollout.max_concurrent_rollouts": 2 * rollout.max_concurrent_rollouts}, split)
    if not rollout.stream and config.grpo.prompts_per_step > 1:
        yield Change({"rollout.stream": True}, split)
    if split.num_servers:
        more = moved(plan, config, replace(split, num_servers=split.num_servers + 1))
        text = "" if config.inference.launch else "one more server"
        yield replace(more, more=text, note=f"needs more devices: {plan.server_devices}")
    if not split.num_lent:
        yield from lendings(plan, config, split)


def lendings(plan: Plan, config: JobConfig, split: Split) -> Iterator[Change]:
    """Yields two ways to lend: all devices train and are lent, or more servers run on the training devices."""
    if not config.inference.launch:
        return  # servers that the run has not started cannot be lent
    ranks = replace(plan, split=split).num_devices // plan.unit * plan.unit
    together = Split(ranks, 0, max(1, ranks // plan.server_devices))
    note = f"{counted(together.num_lent, 'server')} on {counted(ranks, 'training rank')}"
    yield replace(moved(plan, config, together), note=note)
    beside = replace(split, num_lent=max(1, split.num_ranks // plan.server_devices))
    note = f"{counted(beside.num_lent, 'more server')}, lent"
    yield replace(moved(plan, config, beside), note=note)


def moved(plan: Plan, config: JobConfig, split: Split) -> Change:
    """Returns the settings that change the run's split of the devices to ``split``.

    Parts of the split that no setting can change are left out.
    """
    settings = dict(_server_settings(config, split))
    if split.num_ranks != plan.split.num_ranks:
        settings["nproc"] = split.num_ranks
        smallest, is_fixed = ranks_of_layout(config)
        if is_fixed and split.num_ranks != smallest:
            settings["parallelism.data_parallel_shard_degree"] = -1
    if split.all_servers != plan.split.all_servers:
        in_flight = plan.on(split).rollout.max_concurrent_rollouts
        settings["rollout.max_concurrent_rollouts"] = in_flight
    return Change(settings, split)


def _server_settings(config: JobConfig, split: Split) -> Iterator[tuple[str, Any]]:
    """Yields settings that launch the servers of ``split``, changing at most one table of ``[cluster]``."""
    inference, own = config.inference, [g for g in server_groups(config) if not g.is_lent]
    if not inference.launch:
        return
    is_lent = split.num_lent > 0
    if not config.cluster and not (is_lent and split.num_servers):
        if split.all_servers != inference.num_servers:
            yield "inference.num_servers", split.all_servers
        if is_lent != inference.lend:
            yield "inference.lend", is_lent
        return
    if not config.cluster:
        if inference.num_servers != 1:
            yield "inference.num_servers", 1
        yield "cluster.own.tags", ["rollout"]
        yield "cluster.own.num_servers", split.num_servers
    elif len(own) == 1 and split.num_servers != own[0].num_servers:
        yield f"{own[0].key}.num_servers", split.num_servers
    if is_lent and not lent_groups(config):
        yield "cluster.lent.tags", ["train", "rollout"]
        yield "cluster.lent.num_servers", split.num_lent


def compare(found: Iterable[tuple[Change, System]], before: Spread) -> list[_Row]:
    """Simulates the changes, and returns them with their gain over ``before``, the best first."""
    seeds = len(before.outcomes)
    rows = [(change, *spread(system, seeds).gain(before)) for change, system in found]
    return sorted(rows, key=lambda row: row[1], reverse=True)


def recommended(rows: Iterable[_Row]) -> _Row | None:
    """Returns the first change whose gain, less twice its standard error, exceeds 1 %, or None."""
    return next((row for row in rows if row[1] - 2 * row[2] > 1 + _LEAST_GAIN), None)
