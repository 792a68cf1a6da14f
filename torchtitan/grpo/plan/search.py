# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares simulated runs: over seeds, over splits of the devices, and with single settings changed.

All runs that are compared have the same seeds, hence the same lengths, so that differences between
them are known better than each of them.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchtitan.grpo.plan.simulation import Outcome, simulate
from torchtitan.grpo.plan.system import System

_COARSE = 8  # splits that are tried first
_SEARCH_BATCHES = 8
_NEARLY = 0.97
_LEAST_GAIN = 0.01  # what a change must gain to be named


@dataclass(frozen=True)
class Split:
    """Training ranks, servers with devices of their own, and servers on the ranks' devices."""

    num_ranks: int
    num_servers: int
    num_lent: int = 0


@dataclass(frozen=True)
class Plan:
    """A system with ``split.num_ranks`` ranks. A server takes ``server_devices`` devices.

    The layout can have multiples of ``unit`` ranks. A batch of ``row_tokens`` for each unit keeps it busy.
    """

    system: System
    split: Split
    unit: int = 1
    server_devices: int = 1
    row_tokens: int = 0

    @property
    def num_devices(self) -> int:
        return self.split.num_ranks + self.split.num_servers * self.server_devices

    def on(self, split: Split) -> System:
        """The system on other devices, with as many completions in flight for each server as before.

        Communication is not in it: training on twice the ranks takes half as long for each token, as
        long as each unit of ranks has a row. Weights are sent longer in proportion to the servers of a rank.
        """
        system, old = self.system, self.split
        ranks = self._useful(old.num_ranks) / self._useful(split.num_ranks)
        servers = split.num_servers + split.num_lent
        more = servers / (old.num_servers + old.num_lent)
        costs = system.costs
        slower = max(1.0, more * old.num_ranks / split.num_ranks)
        push = costs.push + costs.transfer * (slower - 1)
        in_flight = round(system.rollout.max_concurrent_rollouts * more)
        return replace(
            system,
            costs=replace(
                costs,
                train_token=costs.train_token * ranks,
                push=push,
                transfer=costs.transfer * slower,
            ),
            rollout=replace(
                system.rollout, max_concurrent_rollouts=max(system.grpo.group_size, in_flight)
            ),
            num_servers=split.num_servers,
            num_lent=split.num_lent,
        )

    def _useful(self, num_ranks: int) -> int:
        """Ranks that have a row of a batch to train on."""
        if not self.row_tokens:
            return num_ranks
        system = self.system
        length = system.prompt_tokens + system.lengths.mean(system.rollout.max_new_tokens)
        rows = max(1, -(-int(system.batch_completions * length) // self.row_tokens))
        return min(num_ranks, self.unit * rows)


@dataclass(frozen=True)
class Spread:
    """Outcomes of the same system with several seeds."""

    outcomes: Sequence[Outcome]

    def mean(self, name: str) -> float:
        return statistics.fmean(getattr(outcome, name) for outcome in self.outcomes)

    def deviation(self, name: str) -> float:
        return statistics.stdev(getattr(outcome, name) for outcome in self.outcomes)

    def gain(self, before: "Spread") -> tuple[float, float]:
        """How many times more samples a second, and the standard error of that."""
        pairs = zip(self.outcomes, before.outcomes, strict=True)
        ratios = [new.samples_per_second / old.samples_per_second for new, old in pairs]
        return statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5


def spread(system: System, seeds: int) -> Spread:
    return Spread([simulate(system, seed) for seed in range(seeds)])


def best_split(plan: Plan, num_devices: int, *, seed: int = 0) -> tuple[Split, float]:
    """Returns the split of the devices with the most samples a second, and that number.

    Few splits are all tried; of many, first some over the whole range, and then finer around the best.
    """
    splits = _splits(plan, num_devices)
    known: dict[int, float] = {}

    def rate(index: int) -> float:
        if index not in known:
            system = plan.on(splits[index])
            known[index] = simulate(system, seed, _SEARCH_BATCHES).samples_per_second
        return known[index]

    low, high = 0, len(splits) - 1
    while True:
        step = max(1, (high - low) // _COARSE)
        best = max(range(low, high + 1, step), key=rate)
        if step == 1:
            break
        low, high = max(0, best - step), min(len(splits) - 1, best + step)
    # Of equally fast splits, the one in the middle of them is the safest.
    best = max(known, key=lambda index: known[index])
    return splits[best], known[best]


def smaller(plan: Plan, split: Split, rate: float, *, seed: int = 0) -> int:
    """The fewest devices, halved again and again, that reach nearly the same rate in the same ratio."""
    fewest = split
    while fewest.num_ranks >= 2 * plan.unit and fewest.num_servers > 1:
        ranks = fewest.num_ranks // 2 // plan.unit * plan.unit
        half = Split(ranks, fewest.num_servers // 2)
        found = simulate(plan.on(half), seed, _SEARCH_BATCHES).samples_per_second
        if found < _NEARLY * rate:
            break
        fewest = half
    return replace(plan, split=fewest).num_devices


def _splits(plan: Plan, num_devices: int) -> list[Split]:
    """All splits; a thousand of them, evenly spaced by the ranks, stand for more."""
    most = (num_devices - plan.server_devices) // plan.unit
    if most < 1:
        raise ValueError(
            f"--devices must be at least {plan.unit + plan.server_devices}, {plan.unit} for training as "
            f"[parallelism] divides the model and {plan.server_devices} for a server, got {num_devices}."
        )
    stride = max(1, most // 1000)
    ranks = [plan.unit * number for number in range(1, most + 1, stride)]
    return [Split(r, (num_devices - r) // plan.server_devices) for r in ranks]


@dataclass(frozen=True)
class Change:
    """A change of a setting, the system with it, and what it costs."""

    name: str
    system: System
    note: str = ""


def changes(plan: Plan) -> Iterator[Change]:
    """Single changes of the settings that decide how training and rollouts overlap."""
    system, split = plan.system, plan.split
    rollout = system.rollout

    def changed(**settings: object) -> System:
        return replace(system, rollout=replace(rollout, **settings))  # pyright: ignore

    age, places = rollout.max_head_offpolicyness + 1, 2 * rollout.max_concurrent_rollouts
    yield Change(
        f"rollout.max_head_offpolicyness = {age}",
        changed(max_head_offpolicyness=age),
        "older samples",
    )
    yield Change(
        f"rollout.max_concurrent_rollouts = {places}", changed(max_concurrent_rollouts=places)
    )
    if not rollout.longest_first:
        yield Change(
            "rollout.longest_first = true",
            changed(longest_first=True),
            "if lengths were predicted exactly",
        )
    if rollout.overdue == "wait":
        part = rollout.segment_tokens or max(1, rollout.max_new_tokens // 8)
        name = "" if rollout.segment_tokens else f"rollout.segment_tokens = {part}, "
        for way, note in (("cut", "shorter samples"), ("resume", "groups of two versions")):
            system_of_way = changed(segment_tokens=part, overdue=way)
            yield Change(f'{name}rollout.overdue = "{way}"', system_of_way, note)
    if not rollout.stream and not split.num_lent and system.grpo.prompts_per_step > 1:
        yield Change("rollout.stream = true", changed(stream=True))
    if split.num_servers:
        more = replace(split, num_servers=split.num_servers + 1)
        yield Change(
            f"inference.num_servers = {more.num_servers}",
            plan.on(more),
            f"needs more devices: {plan.server_devices}",
        )
    yield from _moved(plan)
    if not split.num_lent and not rollout.stream and system.grpo.async_weight_update:
        yield from lendings(plan, split)


def lendings(plan: Plan, split: Split) -> Iterator[Change]:
    """Both ways to lend on the devices of a split without lending."""
    devices = replace(plan, split=split).num_devices
    ranks = devices // plan.unit * plan.unit
    together = Split(ranks, 0, max(1, ranks // plan.server_devices))
    yield Change(
        "inference.lend = true", plan.on(together), f"all servers on {ranks:,} training ranks"
    )
    lent = max(1, split.num_ranks // plan.server_devices)
    beside = plan.on(replace(split, num_lent=lent))
    yield Change('[cluster] tags = ["train", "rollout"]', beside, f"{lent:,} more servers, lent")


def _moved(plan: Plan) -> Iterator[Change]:
    """The smallest changes of the split that need no further devices."""
    split, step = plan.split, max(plan.unit, plan.server_devices)
    servers = max(1, step // plan.server_devices)
    for sign in (-1, 1):
        other = Split(
            split.num_ranks + sign * step, split.num_servers - sign * servers, split.num_lent
        )
        if (
            other.num_ranks >= plan.unit
            and other.num_servers >= 1
            and other.num_ranks % plan.unit == 0
        ):
            yield Change(
                f"{other.num_ranks} training ranks and {other.num_servers} servers", plan.on(other)
            )


def compare(plan: Plan, before: Spread) -> list[tuple[Change, float, float]]:
    """Changes with their gains and standard errors, the best first."""
    seeds = len(before.outcomes)
    found = [(change, *spread(change.system, seeds).gain(before)) for change in changes(plan)]
    return sorted(found, key=lambda row: row[1], reverse=True)


def worth_naming(gain: float, error: float) -> bool:
    return gain - 2 * error > 1 + _LEAST_GAIN
