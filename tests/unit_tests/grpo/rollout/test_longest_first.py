# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The order in which prompts are started."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.rollout.longest_first import LongestFirst
from torchtitan.grpo.types import Prompt


def prompts_of(lengths: list[float]) -> tuple[list[Prompt], dict[int, float]]:
    prompts = [Prompt(i, "", np.array([i], np.int32), {}) for i in range(len(lengths))]
    return prompts, dict(enumerate(lengths))


def handed_out(window: int, lengths: list[float], *, longest_first: bool = True) -> list[int]:
    prompts, by_index = prompts_of(lengths)
    order = LongestFirst(window, lambda p: by_index[p.group_id], longest_first=longest_first)
    coming, out = iter(prompts), []
    for _ in range(len(lengths) // window * window if longest_first else len(lengths)):
        while (prompt := order.pop()) is None:
            order.push(next(coming))
        out.append(prompt.group_id)
    return out


def test_the_example_of_its_docstring():
    assert handed_out(3, [5, 9, 7, 1, 2, 8]) == [1, 2, 0, 5, 4, 3]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 5), max_size=60))
def test_each_window_is_handed_out_whole_longest_first_and_stable(window: int, lengths: list[int]):
    out = handed_out(window, [float(length) for length in lengths])
    for start in range(0, len(out), window):
        part = out[start : start + window]
        assert sorted(part) == list(range(start, start + window))
        assert part == sorted(part, key=lambda i: (-lengths[i], i))


def test_switched_off_it_hands_out_at_once_and_predicts_nothing():
    def predict(prompt: Prompt) -> float:
        raise AssertionError("nobody needs a prediction")

    prompts, _ = prompts_of([1, 2, 3])
    order = LongestFirst(16, predict, longest_first=False)
    for prompt in prompts:
        order.push(prompt)
        assert len(order) == 1
        assert order.pop() is prompt
        assert order.pop() is None


def test_a_window_is_predicted_as_it_comes_in_and_waits_until_it_is_complete():
    prompts, lengths = prompts_of([1, 3, 2])
    order = LongestFirst(3, lambda p: lengths[p.group_id])
    for prompt in prompts[:2]:
        order.push(prompt)
        assert order.pop() is None
    assert len(order) == 2
    order.push(prompts[2])
    lengths.clear()  # nobody asks again
    assert [order.pop(), order.pop(), order.pop(), order.pop()] == [
        prompts[1],
        prompts[2],
        prompts[0],
        None,
    ]
