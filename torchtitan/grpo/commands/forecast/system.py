# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a simulation is about: settings, servers, costs and lengths.

A large system is simulated as a smaller one (:func:`scaled`), because its servers are equal and share the
work evenly. Scaled down by ``k``, the simulation has ``1 / k`` of the batch, of the completions in
flight, and of the servers, and training on a token takes ``k`` times as long. If the number of servers
cannot be divided by ``k``, each server runs ``c`` times too few completions. Each completion then slows its
server down ``c`` times as much, so that the server keeps its speed.

The error: the last of fewer completions ends earlier, which matters where a batch waits for its longest
completion. 256 completions that stood for 2,048 gave 1 to 4 % too many samples a second in synchronous
training, and from 2 % too few to 4 % too many with bounds of 1 and 2 (log-normal lengths, 64 servers).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from torchtitan.grpo.config import GRPO, Rollout

_MOST_COMPLETIONS = 256  # of a batch; an event of each costs about 10 µs
_FEWEST_GROUPS = 8
_GRID = 1024  # quantiles of a distribution


@dataclass(frozen=True)
class Costs:
    """Times in seconds, on the devices of a :class:`System`.

    A completion of T tokens takes ``request + T * (token + running * beside)``, where ``running`` counts
    all completions that the server runs at once. ``prefill`` is for one prompt token. ``reward`` lasts from
    the end of a group to its rewards, however many groups are scored at once. ``push`` lasts from the end
    of a step until servers are attested to have the new weights; its part ``transfer`` grows with the
    number of servers. ``room`` is the time in which training frees its memory for a lent server.
    """

    token: float
    beside: float
    request: float = 0.0
    prefill: float = 0.0
    train: float = 0.0
    train_token: float = 0.0
    push: float = 0.0
    transfer: float = 0.0
    reward: float = 0.0
    room: float = 0.0
    wake: float = 0.0
    sleep: float = 0.0


@dataclass(frozen=True)
class Lengths:
    """Quantiles of the length of a completion before it is truncated, in tokens, in rising order."""

    quantiles: np.ndarray

    @classmethod
    def lognormal(cls, mean: float, spread: float) -> "Lengths":
        """``spread`` is the standard deviation divided by the mean."""
        sigma = math.sqrt(math.log1p(spread**2))
        normal = np.sort(np.random.default_rng(0).standard_normal(_GRID * 64))[32::64]
        return cls(mean * np.exp(sigma * normal - sigma**2 / 2))

    @classmethod
    def measured(cls, ended: Sequence[float], cut: float, limit: int) -> "Lengths":
        """Takes the lengths that ``ended`` below the old limit, and the fraction ``cut`` that reached it.

        Beyond the limit, every token is assumed to be the last one with the same probability.
        """
        num_cut = min(_GRID - 1, round(cut * _GRID))
        below = np.quantile(ended, _places(_GRID - num_cut))
        tokens_per_end = (below.sum() + num_cut * limit) / len(below)
        beyond = limit - tokens_per_end * np.log1p(-_places(num_cut))
        return cls(np.concatenate([below, beyond]))

    def draw(self, random: np.random.Generator, number: int, limit: int) -> list[int]:
        """Draws ``number`` lengths of at least 1 and at most ``limit`` tokens."""
        last = len(self.quantiles) - 1
        found = np.interp(random.random(number) * last, np.arange(last + 1), self.quantiles)
        return np.clip(np.rint(found), 1, limit).astype(int).tolist()

    def mean(self, limit: int) -> float:
        return float(np.clip(self.quantiles, 1, limit).mean())


def _places(number: int) -> np.ndarray:
    """The midpoints of ``number`` equal parts of the interval [0, 1]."""
    return (np.arange(number) + 0.5) / max(1, number)


@dataclass(frozen=True)
class System:
    """A run as it is simulated.

    ``num_servers`` counts servers with hardware of their own, and ``num_lent`` servers on the training
    devices. ``max_running`` is how many completions fit into a server's cache; 0 means no limit.
    ``shared_row`` is the number of tokens of a row in which completions share their prompt; 0 if they
    do not. ``dropped`` is the fraction of finished groups that is not trained on. ``off`` is the relative
    difference between the rate of the measured run and that of its simulation: predictions have at
    least this error.
    """

    grpo: GRPO
    rollout: Rollout
    costs: Costs
    lengths: Lengths
    num_servers: int
    num_lent: int = 0
    max_running: int = 0
    prompt_tokens: float = 0.0
    shared_row: int = 0
    dropped: float = 0.0
    off: float = 0.0

    @cached_property
    def mean_tokens(self) -> float:
        """Mean tokens of a completion."""
        return self.lengths.mean(self.rollout.max_new_tokens)

    def trained_tokens(self, num_groups: int, completion_tokens: int) -> float:
        """Tokens that training computes for groups; a prompt that a row shares counts once."""
        size = self.grpo.group_size
        fitting = (self.shared_row - self.prompt_tokens) // max(self.mean_tokens, 1.0)
        prompts = math.ceil(size / min(max(fitting, 1.0), size))
        return num_groups * prompts * self.prompt_tokens + completion_tokens

    @property
    def batch_completions(self) -> int:
        return self.grpo.prompts_per_step * self.grpo.group_size

    @property
    def window(self) -> int:
        """How many completions a server is given at once, whether the other servers are awake or not.

        As in a run, completions are divided evenly, up to what a server can run.
        """
        quota = -(-self.rollout.max_concurrent_rollouts // (self.num_servers + self.num_lent))
        return max(self.grpo.group_size, min(quota, self.max_running or quota))


def scaled(system: System, most: int = _MOST_COMPLETIONS) -> tuple[System, float]:
    """Returns a smaller system that behaves alike, and how many times more samples the real one has."""
    grpo, rollout, costs = system.grpo, system.rollout, system.costs
    ages = rollout.max_head_offpolicyness + 1
    groups = max(_FEWEST_GROUPS, min(most // grpo.group_size, most // ages))
    groups = min(grpo.prompts_per_step, groups)
    factor = grpo.prompts_per_step / groups
    # More servers than open groups have nothing to do.
    busy = [min(n, ages * grpo.prompts_per_step) for n in (system.num_servers, system.num_lent)]
    own, lent = (max(1, round(number / factor)) if number else 0 for number in busy)
    if factor == 1.0 and busy == [system.num_servers, system.num_lent]:
        return system, 1.0
    crowd = factor * (own + lent) / sum(busy)
    per_server = rollout.max_concurrent_rollouts / (system.num_servers + system.num_lent)
    in_flight = max(grpo.group_size, round(per_server * sum(busy) / factor))
    buffered = round(rollout.buffer_size_limit / factor)
    small = replace(
        system,
        grpo=replace(grpo, prompts_per_step=groups),
        rollout=replace(rollout, max_concurrent_rollouts=in_flight, buffer_size_limit=buffered),
        costs=replace(
            costs,
            beside=costs.beside * crowd,
            prefill=costs.prefill * crowd,
            train_token=costs.train_token * factor,
        ),
        num_servers=own,
        num_lent=lent,
        max_running=math.ceil(system.max_running / crowd),
    )
    return small, factor
