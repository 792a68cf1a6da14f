# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares simulated runs: over seeds, and over splits of the devices.

All runs that are compared have the same seeds, hence the same lengths, so that a difference between two
runs is known more exactly than either run.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchtitan.grpo.commands.forecast.lend_forecast import LendingSimulation
from torchtitan.grpo.commands.forecast.simulation import Outcome, Simulation
from torchtitan.grpo.commands.forecast.system import System, scaled

_BATCHES, _SEARCH_BATCHES = 12, 8
_COARSE = 8  # splits that are tried first
TOLERANCE = 0.01
"""Part of the best rate that fewer devices may lack."""


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def simulate(system: System, seed: int = 0, num_batches: int = _BATCHES) -> Outcome:
    """Simulates a system, scaled down if it is large. Equal arguments give equal results."""
    small, factor = scaled(system)
    kind = LendingSimulation if small.num_lent else Simulation
    return kind(small, seed).run(num_batches, factor)


@dataclass(frozen=True)
class Split:
    """Training ranks, servers with devices of their own, and servers on the ranks' devices."""

    num_ranks: int
    num_servers: int
    num_lent: int = 0

    @property
    def all_servers(self) -> int:
        return self.num_servers + self.num_lent

    @property
    def push_load(self) -> float:
        """Number of servers to which each rank sends weights, at least 1."""
        return max(1.0, self.all_servers / self.num_ranks)


@dataclass(frozen=True)
class Plan:
    """A system with ``split.num_ranks`` ranks. A server takes ``server_devices`` devices.

    The number of ranks must be a multiple of ``unit``. Each unit trains on ``row_tokens`` tokens at a time.
    """

    system: System
    split: Split
    unit: int = 1
    server_devices: int = 1
    row_tokens: int = 0

    @property
    def num_devices(self) -> int:
        return self.split.num_ranks + self.split.num_servers * self.server_devices

    @property
    def fewest_devices(self) -> int:
        """The fewest devices on which a split without lending is possible."""
        return self.unit + self.server_devices

    def on(self, split: Split) -> System:
        """The system with another split, and with as many completions in flight for each server as before.

        Communication is ignored: with twice the ranks, training takes half as long for each token, as long as
        each unit of ranks has a row. Sending weights takes time in proportion to the servers for each rank.
        """
        system, old, costs = self.system, self.split, self.system.costs
        slower = split.push_load / old.push_load
        more = split.all_servers / old.all_servers
        in_flight = round(system.rollout.max_concurrent_rollouts * more)
        in_flight = max(system.grpo.group_size, in_flight)
        costs = replace(
            costs,
            train_token=costs.train_token
            * self._useful(old.num_ranks)
            / self._useful(split.num_ranks),
            push=costs.push + costs.transfer * (slower - 1),
            transfer=costs.transfer * slower,
        )
        rollout = replace(system.rollout, max_concurrent_rollouts=in_flight)
        numbers = {"num_servers": split.num_servers, "num_lent": split.num_lent}
        return replace(system, costs=costs, rollout=rollout, **numbers)

    def _useful(self, num_ranks: int) -> int:
        """Number of ranks for which a batch has a row to train on."""
        if not self.row_tokens:
            return num_ranks
        length = self.system.prompt_tokens + self.system.mean_tokens
        rows = -(-int(self.system.batch_completions * length) // self.row_tokens)
        return min(num_ranks, self.unit * max(1, rows))


@dataclass(frozen=True)
class Spread:
    """Outcomes of the same system with several seeds."""

    outcomes: Sequence[Outcome]
    off: float = 0.0

    def mean(self, name: str) -> float:
        return statistics.fmean(getattr(outcome, name) for outcome in self.outcomes)

    def deviation(self, name: str) -> float:
        spread = statistics.stdev(getattr(outcome, name) for outcome in self.outcomes)
        return math.hypot(spread, self.off * self.mean(name))

    def figures(self) -> dict[str, float]:
        shares = ("trained", "waited", "pushed", "lent", "busy", "lent_tokens")
        found = {f"{name}_fraction": self.mean(name) for name in shares}
        for name in ("samples_per_second", "step_seconds"):
            found |= {name: self.mean(name), f"{name}_error": self.deviation(name)}
        oldest = max(outcome.max_age for outcome in self.outcomes)
        return found | {"mean_age_batches": self.mean("mean_age"), "max_age_batches": oldest}

    def gain(self, before: "Spread") -> tuple[float, float]:
        """The ratio of samples per second to those ``before``, and the error of the ratio."""
        pairs = zip(self.outcomes, before.outcomes, strict=True)
        ratios = [new.samples_per_second / old.samples_per_second for new, old in pairs]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        return statistics.fmean(ratios), math.hypot(error, before.off)


def spread(system: System, seeds: int) -> Spread:
    return Spread([simulate(system, seed) for seed in range(seeds)], system.off)


def best_split(plan: Plan, num_devices: int, enough: float = math.inf) -> tuple[Split, float]:
    """Returns the split of the devices with the most samples per second, and that rate.

    If there are many splits, some over the whole range are tried first, and then more around the best
    one, until a rate reaches ``enough``.
    """
    splits = _splits(plan, num_devices)
    known: dict[int, float] = {}

    def rate(index: int) -> float:
        if index not in known:
            system = plan.on(splits[index])
            known[index] = simulate(system, 0, _SEARCH_BATCHES).samples_per_second
        return known[index]

    low, high, step = 0, len(splits) - 1, 0
    while step != 1 and max(known.values(), default=0.0) < enough:
        step = max(1, -(-(high - low) // _COARSE))
        best = max(range(low, high + 1, step), key=rate)
        low, high = max(0, best - step), min(len(splits) - 1, best + step)
    best = max(known, key=known.__getitem__)
    return splits[best], known[best]


def smallest_split(plan: Plan, num_devices: int) -> tuple[Split, float]:
    """Like :func:`best_split`, but halves the number of devices as long as the run stays nearly as fast."""
    found = best_split(plan, num_devices)
    enough = (1 - TOLERANCE) * found[1]
    while (num_devices := num_devices // 2) >= plan.fewest_devices:
        fewer = best_split(plan, num_devices, enough)
        if fewer[1] < enough:
            break
        found = fewer
    return found


def _splits(plan: Plan, num_devices: int) -> list[Split]:
    """All splits; if there are far more than a thousand, about that many with evenly spaced ranks."""
    most = (num_devices - plan.server_devices) // plan.unit
    if num_devices < plan.fewest_devices:
        raise ValueError(
            f"--devices must be at least {plan.fewest_devices}, {plan.unit} for training as "
            f"[parallelism] divides the model and {plan.server_devices} for a server, got {num_devices}."
        )
    ranks = [plan.unit * number for number in range(1, most + 1, max(1, most // 1000))]
    return [Split(r, (num_devices - r) // plan.server_devices) for r in ranks]
