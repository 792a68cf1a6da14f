# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a completion's time consists of is found again from completions of all kinds."""

import numpy as np
import pytest

from torchtitan.grpo.rollout.serving.speed_fit import SpeedFit

TRUE = (0.03, 0.002, 0.0001)


def fitted(tokens: np.ndarray, running: np.ndarray, noise: float = 0.0) -> list[float] | None:
    fit = SpeedFit((1e-3, 0.0, 1e-3))
    random = np.random.default_rng(0)
    for n, beside in zip(tokens, running, strict=True):
        seconds = TRUE[0] + n * (TRUE[1] + beside * TRUE[2])
        fit.add((1.0, n, n * beside), seconds * (1 + noise * random.standard_normal()))
    return fit.costs()


def test_completions_of_all_kinds_tell_the_costs_apart() -> None:
    random = np.random.default_rng(1)
    tokens, running = random.integers(5, 400, 3000), random.uniform(1, 60, 3000)
    found = fitted(tokens, running, noise=0.05)
    assert found is not None
    assert found[1:] == pytest.approx(TRUE[1:], rel=0.1)


def test_equal_completions_are_explained_by_their_tokens() -> None:
    found = fitted(np.full(50, 100), np.full(50, 10.0))
    assert found is not None
    request, token, beside = found
    assert request + 100 * (token + 10 * beside) == pytest.approx(0.03 + 100 * 0.003, rel=1e-2)
    assert token == pytest.approx(0.0033, rel=0.05), "nothing shows that others slow it down"


def test_too_few_completions_tell_nothing() -> None:
    assert fitted(np.full(15, 100), np.full(15, 10.0)) is None


def test_costs_are_never_negative() -> None:
    fit = SpeedFit((1e-3, 0.0))
    for n in range(1, 100):
        fit.add((1.0, n), max(0.0, 0.1 * n - 2.0))
    costs = fit.costs()
    assert costs is not None and min(costs) >= 0 and costs[1] > 0.05
