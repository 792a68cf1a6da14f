# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A small system, and other settings of it."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from torchtitan.grpo.commands.forecast import search
from torchtitan.grpo.commands.forecast.simulation import Outcome
from torchtitan.grpo.commands.forecast.system import Costs, Lengths, System
from torchtitan.grpo.config import GRPO, Rollout

_simulate, _outcomes = search.simulate, dict[bytes, Outcome]()


@pytest.fixture(autouse=True)
def _simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the same configuration compare many systems that another test has simulated."""

    def known(*arguments: Any) -> Outcome:
        key = pickle.dumps(arguments)
        if key not in _outcomes:
            _outcomes[key] = _simulate(*arguments)
        return _outcomes[key]

    monkeypatch.setattr(search, "simulate", known)


@pytest.fixture
def system() -> System:
    """Generation takes longer than training."""
    return System(
        GRPO(group_size=4, prompts_per_step=8),
        Rollout(max_head_offpolicyness=2, max_concurrent_rollouts=64, max_new_tokens=400),
        Costs(token=0.02, beside=0.0005, train=0.1, train_token=1e-4, push=0.2, reward=0.05),
        Lengths.lognormal(150.0, 0.8),
        num_servers=2,
        prompt_tokens=20.0,
    )


@pytest.fixture
def changed(system: System) -> Callable[..., System]:
    """``changed(max_new_tokens=9, num_servers=3)``: settings of any of the tables, or of the system."""

    def make(**settings: Any) -> System:
        def of(table: Any) -> dict[str, Any]:
            return {key: value for key, value in settings.items() if hasattr(table, key)}

        parts = {name: getattr(system, name) for name in ("grpo", "rollout", "costs")}
        made = {name: replace(part, **of(part)) for name, part in parts.items()}
        return replace(system, **made, **of(system))

    return make
