# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The sets that prompts are drawn from, and their proportions.

The set of a draw is computed from the draw's number, by the divisor method of Sainte-Laguë,
which apportions the seats of a parliament to parties. Draw ``c`` (counted from 0) of a set of
weight ``w`` has the key ``(2 c + 1) / w``. Draws are taken in the order of their keys, and
among equal keys in the order of the sets. Invariants for K sets, where set ``i`` has the
fraction ``s`` of the total weight, after ``p`` draws:

- Set ``i`` was drawn ``p s`` times, give or take at most ``1/2 + K s / 2``.
- After each period, which is the sum of the weights reduced to the smallest integers, the count
  is exact.
- No draw depends on earlier draws. The counts after ``p`` draws are computed in K**2 steps, for
  any ``p``.

Example: weights 3 and 1 give the order A A B A, repeated forever.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.environments import environments_of, own_key
from torchtitan.grpo.rollout.prompts.prompt_set import PromptSet
from torchtitan.grpo.rollout.tokenizer import TextCodec


class Draw(NamedTuple):
    """The set that a prompt is drawn from. ``number`` is how many earlier prompts came from that set."""

    set: int
    number: int


class Interleaving:
    """The order in which prompts are drawn from several sets.

    Weights must be positive. Each is taken as the decimal number that Python prints for it, so that
    0.7 and 0.3 are in the ratio of exactly 7 to 3.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        integers = [int(weight * scale) for weight in exact]
        divisor = math.gcd(*integers)
        self.weights = [weight // divisor for weight in integers]
        self.period = sum(self.weights)
        # Keys with a common denominator are integers, which compare exactly.
        common = math.lcm(*self.weights)
        self._steps = [common // weight for weight in self.weights]

    def at(self, position: int) -> Draw:
        """The draw that follows the first ``position`` draws."""
        counts = self.counts(position)
        next_set = self._next_set(counts)
        return Draw(next_set, counts[next_set])

    def counts(self, position: int) -> list[int]:
        """How often each set is drawn from in the first ``position`` draws."""
        # Between the last key taken and the first key not taken lies a T with
        # |count - T w / 2| <= 1/2 for every set. The sum over the sets bounds T, and so gives a
        # lower bound of each count, from which at most one draw per set is missing.
        shift = 2 * position - len(self.weights)
        counts = [
            max(0, -((self.period - weight * shift) // (2 * self.period)))
            for weight in self.weights
        ]
        for _ in range(position - sum(counts)):
            counts[self._next_set(counts)] += 1
        return counts

    def _next_set(self, counts: list[int]) -> int:
        keys = [(2 * count + 1) * step for count, step in zip(counts, self._steps, strict=True)]
        return keys.index(min(keys))


def open_sets(config: RolloutProcessConfig, codec: TextCodec) -> list[PromptSet]:
    """Opens the prompt sets of all environments: one for each, or several with ``prompts.paths``.

    Raises ValueError if a set cannot be used.
    """
    sets = []
    with ExitStack() as stack:
        for environment, own in environments_of(config).items():
            settings = own.prompts
            key = own_key(environment, "prompts.paths" if settings.paths else "prompts.path")
            for path, name in _named(settings.paths) or [(settings.path, environment or None)]:
                prompts = PromptSet.open(
                    path, settings.split, own, codec, key, settings.name, name, environment
                )
                sets.append(stack.enter_context(closing(prompts)))
        stack.pop_all()
    return sets


def _named(paths: list[str]) -> list[tuple[str, str]]:
    """Names each path by its stem, or by the path if stems are not unique."""
    stems = [_stem(path) for path in paths]
    are_unique = len(set(stems)) == len(paths)
    return list(zip(paths, stems if are_unique else paths, strict=True))


def short_names(paths: Sequence[str]) -> list[str]:
    """Makes unique names without slashes: ``a/train.jsonl``, ``b/train.jsonl`` and ``c/more.jsonl``
    become ``a-train``, ``b-train`` and ``more``.
    """
    parts = [(*Path(path).parts[:-1], _stem(path)) for path in paths]
    names: list[str] = []
    for own in parts:
        length = 1
        while sum(other[-length:] == own[-length:] for other in parts) > 1 and length < len(own):
            length += 1
        base = name = "-".join(part.strip("/") for part in own[-length:]).strip("-")
        number = 1
        while name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names


def _stem(path: str) -> str:
    # Names of data sets may contain dots, as in "owner/set-v1.5".
    last = Path(path)
    if last.name in ("", ".."):  # the working folder or the one above it
        last = last.resolve()
    return last.stem if last.suffix in (".jsonl", ".json", ".parquet") else last.name
