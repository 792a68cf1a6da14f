# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Bounds at the fields of the tables, defaults of torchtitan's tables, and documentation of both."""

import dataclasses
import math

import pytest

from torchtitan.grpo import config as tables
from torchtitan.grpo.config import frame
from torchtitan.grpo.config.bounds import Bounds, above, at_least, bounds_of
from torchtitan.grpo.config.field_docs import field_docs, first_sentence
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import ConfigError, load_config
from torchtitan.grpo.config_checks.ranges import check_ranges
from torchtitan.grpo.run_folder.start_record import describe_settings

TABLES = [
    field for field in dataclasses.fields(JobConfig)
    if field.type in (*vars(tables).values(), *vars(frame).values())
]  # fmt: skip
BOUNDED = [
    (table.name, name, bounds)
    for table in TABLES
    for name, bounds in bounds_of(table.type).items()  # pyright: ignore
]


LIVE = ["--model.hf_assets_path=m", "--prompts.path=p", "--inference.launch"]
LIVE += ["--reward.functions=exact_match"]


@pytest.mark.parametrize(
    ("bounds", "text", "valid", "invalid"),
    [
        (at_least(1), "at least 1", [1, 2], [0, 0.999, -1, math.nan]),
        (above(0), "above 0", [1e-9, math.inf], [0, -1e-9, math.nan]),
        (at_least(0).below(1), "at least 0 and below 1", [0, 0.999], [1, -1e-9, math.nan]),
        (above(0).at_most(1), "above 0 and at most 1", [1e-9, 1], [0, 1.001, math.nan]),
        (above(1).or_value(0, "off"), "above 1, or 0 (off)", [0, 1.1], [1, 0.5, -1, math.nan]),
        (at_least(1).or_value(-1, "all"), "at least 1, or -1 (all)", [-1, 1], [0, -2]),
    ],
)
def test_bounds_allow_what_they_say(bounds: Bounds, text, valid, invalid):
    assert str(bounds) == text
    assert all(bounds.allow(value) for value in valid)
    assert not any(bounds.allow(value) for value in invalid)


def test_most_numbers_are_bounded_and_every_default_is_valid():
    assert len(BOUNDED) > 60
    for table, name, bounds in BOUNDED:
        assert bounds.allow(getattr(getattr(JobConfig(), table), name)), f"{table}.{name}"


def test_the_bounds_of_each_field_are_enforced_by_its_key():
    for table, name, bounds in BOUNDED:
        invalid = bounds.minimum - 1
        if bounds.special is not None and invalid == bounds.special[0]:
            invalid -= 1
        config = JobConfig()
        setattr(getattr(config, table), name, invalid)
        with pytest.raises(ConfigError) as error:
            check_ranges(config)
        assert f"{table}.{name} must be {bounds}, got {invalid}." in str(error.value)


@pytest.mark.parametrize("table", [field.type for field in TABLES])
def test_every_field_has_a_docstring_of_whole_sentences(table):
    docs = field_docs(table)
    for field in dataclasses.fields(table):
        text = docs[field.name]
        assert text.endswith((".", '.")')), f"{table.__name__}.{field.name}"
        assert first_sentence(text)[0].isupper() or text.startswith("`")


def test_the_description_marks_what_differs_from_the_defaults(monkeypatch):
    monkeypatch.setenv("TORCHTITAN_GRPO_API_KEY", "secret")
    given = [
        "--optimizer.weight_decay=0.01",
        "--debug.seed=7",
        "--grpo.group_size=8",
        "--cluster.a.tags=rollout",
    ]
    lines = describe_settings(load_config([*LIVE, *given])).splitlines()
    for line in (
        "weight_decay = 0.01  # default: 0.0", "seed = 7  # default: not set", "lr = 1e-06", "max_norm = 1.0",
        "group_size = 8", 'hf_assets_path = "m"  # default: ""', "launch = true  # default: false",
    ):  # fmt: skip
        assert line in lines, line
    marked = [line for line in lines if "  # default: " in line]
    assert len(marked) == len(given) - 1 + len(LIVE), marked
    assert not [line for line in describe_settings(JobConfig()).splitlines() if "  # " in line]
