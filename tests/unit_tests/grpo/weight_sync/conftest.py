# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Explores all interleavings of a small system."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

State = Any  # hashable, and never changed


class ViolationError(AssertionError):
    """An invariant does not hold; the message tells the steps that led there."""


def explore_all(
    initial: State,
    steps: Callable[[State], Iterable[tuple[str, State]]],
    *,
    is_goal: Callable[[State], bool],
) -> int:
    """Visits every state that can be reached, breadth first; returns their number.

    ``steps`` yields all that may happen next, with the state afterwards, and raises what is wrong
    with a state. From every state a goal must be within reach without any step that begins with
    ``fault``. Raises ViolationError with the shortest way to what is wrong.
    """
    # States are known by their number: to hash one takes longer than all else.
    states, numbers = [initial], {initial: 0}
    came_from: list[tuple[int, str] | None] = [None]
    leads_back: dict[int, list[int]] = {}
    number = 0
    while number < len(states):
        try:
            for what, following in steps(states[number]):
                next_number = numbers.setdefault(following, len(states))
                if next_number == len(states):
                    states.append(following)
                    came_from.append((number, what))
                if not what.startswith("fault"):
                    leads_back.setdefault(next_number, []).append(number)
        except (AssertionError, ValueError) as error:
            way = _way_to(number, came_from)
            raise ViolationError(f"{error}, after{way}\nat {states[number]}") from error
        number += 1
    safe = _that_reach([n for n, state in enumerate(states) if is_goal(state)], leads_back)
    for number, state in enumerate(states):
        if number not in safe:
            way = _way_to(number, came_from)
            raise ViolationError(f"stuck: no goal is in reach, after{way}\nat {state}")
    return len(states)


def _that_reach(goals: list[int], leads_back: dict[int, list[int]]) -> set[int]:
    found, waiting = set(goals), list(goals)
    while waiting:
        for former in leads_back.get(waiting.pop(), ()):
            if former not in found:
                found.add(former)
                waiting.append(former)
    return found


def _way_to(number: int, came_from: list[tuple[int, str] | None]) -> str:
    way = []
    step = came_from[number]
    while step is not None:
        way.append(step[1])
        step = came_from[step[0]]
    return "".join(f"\n  {what}" for what in reversed(way))


@pytest.fixture
def explore() -> Callable[..., int]:
    return explore_all
